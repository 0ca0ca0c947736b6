#!/bin/sh
# Makes a virtual environment with this project and the vLLM for a device.   usage: install.sh VENV cpu|cuda [PYTHON]
set -eu
venv=$1 device=$2 python=${3:-python3}
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
case $version in
3.11 | 3.12 | 3.13) ;;
*) echo "install: Python $version does not run this project; give one from 3.11 to 3.13: make PYTHON=python3.12 ..." >&2 && exit 2 ;;
esac
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install -q --disable-pip-version-check "uv>=0.8"
set -- --python "$venv/bin/python" -e ".[$device,dev]"
if [ "$device" = cpu ]; then
    set -- --override requirements/overrides-cpu.txt "$@"
    # uv does not read pip's configuration: where that names wheels on this machine, they come first; else PyTorch's CPU builds.
    local_wheels=$("$venv/bin/python" -m pip config get global.find-links 2>/dev/null | tr -s ' \n' ',' || true)
    if [ -n "${local_wheels%,}" ]; then
        export UV_FIND_LINKS="${local_wheels%,}"
    else
        set -- --torch-backend cpu "$@"
    fi
fi
# Compiled once here: three processes of an engine import vLLM, and not every environment lets them keep what they compile.
exec "$venv/bin/uv" pip install -q --compile-bytecode "$@"

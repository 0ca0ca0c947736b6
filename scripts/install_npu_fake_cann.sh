#!/bin/sh
# Makes a virtual environment with the real torch_npu over fakes of CANN.   usage: install_npu_fake_cann.sh VENV [PYTHON]
set -eu
venv=$1 python=${2:-python3}
for tool in cc nm; do
    command -v "$tool" >/dev/null || { echo "install_npu_fake_cann: the fakes of CANN need a C compiler and nm; $tool is not there" >&2 && exit 2; }
done
version=$("$python" -c 'import platform, sys; print("%d.%d" % sys.version_info[:2], sys.platform, platform.machine())')
case $version in
3.1[123]\ linux\ *) ;;
*) echo "install_npu_fake_cann: torch-npu 2.13 runs on Linux with Python 3.11 to 3.13, not on Python $version" >&2 && exit 2 ;;
esac
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install -q --disable-pip-version-check "uv>=0.8"
set -- --python "$venv/bin/python" "torch==2.13.0" "torch-npu==2.13.0" numpy pyyaml "pytest>=8" "pytest-timeout>=2"
# uv does not read pip's configuration: where that names wheels on this machine, they come first; else PyTorch's CPU builds.
local_wheels=$("$venv/bin/python" -m pip config get global.find-links 2>/dev/null | tr -s ' \n' ',' || true)
if [ -n "${local_wheels%,}" ]; then
    export UV_FIND_LINKS="${local_wheels%,}"
else
    set -- --torch-backend cpu "$@"
fi
"$venv/bin/uv" pip install -q "$@"
# The mode finds its devices by entry points; what it needs beside PyTorch is there.
"$venv/bin/uv" pip install -q --no-deps --python "$venv/bin/python" -e .
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$venv/bin/python" tests/ascend/fake_cann/libraries.py "$packages" "$venv/cann"

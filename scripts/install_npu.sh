#!/bin/sh
# Makes the virtual environment in which kernels for an Ascend NPU are compiled and simulated, without a device and
# without CANN. triton-ascend is imported as triton, so it cannot share one with vLLM.   usage: install_npu.sh VENV [PYTHON]
set -eu
venv=$1 python=${2:-python3.11}
if [ "$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" != 3.11 ]; then
    echo "install_npu: triton-ascend 3.2.0 and ascendnpu-ir 1.2.0 are used with Python 3.11: make NPU_PYTHON=python3.11 ..." >&2
    exit 2
fi
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install -q --disable-pip-version-check "uv>=0.8"
# pybind11 is imported by triton-ascend, which does not ask for it; its interpreter fails with a newer NumPy.
set -- --python "$venv/bin/python" --override requirements/overrides-npu.txt \
    triton-ascend==3.2.0 ascendnpu-ir==1.2.0 "torch==2.13.*" "numpy<2.4" "pybind11>=3" "pytest>=8"
# uv does not read pip's configuration: where that names wheels on this machine, they come first; else PyTorch's CPU builds.
local_wheels=$("$venv/bin/python" -m pip config get global.find-links 2>/dev/null | tr -s ' \n' ',' || true)
if [ -n "${local_wheels%,}" ]; then
    export UV_FIND_LINKS="${local_wheels%,}"
else
    set -- --torch-backend cpu "$@"
fi
exec "$venv/bin/uv" pip install -q "$@"

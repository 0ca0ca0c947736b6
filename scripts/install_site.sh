#!/bin/sh
# Makes a virtual environment that builds the site and tests it, and installs its scripts.   usage: install_site.sh VENV [PYTHON]
# With BROWSER=install it installs Debian's Chromium, too, where there is none and this user may.
set -eu
venv=$1 python=${2:-python3}
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install -q --disable-pip-version-check "uv>=0.8"
"$venv/bin/uv" pip install -q --python "$venv/bin/python" -e ".[site]"
command -v npm >/dev/null || { echo "install_site: the scripts of the pages need npm (Node.js 18 or newer)" >&2 && exit 2; }
npm ci --prefix site --ignore-scripts --no-audit --no-fund --loglevel=error
if [ "${BROWSER:-}" = install ] && ! command -v chromium >/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium; } >/dev/null ||
            echo "install_site: apt-get could not install chromium" >&2
    fi
    command -v chromium >/dev/null || echo "install_site: no chromium, so tests/site will be skipped; install it" >&2
fi

#!/bin/sh
# An interpreter of another Debian suite, for wheels/build.py --interpreters DIRECTORY. It runs beside
# this system's: with the suite's own loader and libraries, under DIRECTORY/usr/bin.
#
#     sh wheels/debian_python.sh SUITE VERSION DIRECTORY      # sid 3.14 build/wheels/sid
#
# Needs debootstrap (and the rights that it needs) and patchelf.
set -eu
suite=$1 version=$2 root=$3
mirror=${MIRROR:-http://deb.debian.org/debian}

[ -e "$root/usr/bin/python$version" ] || debootstrap --variant=minbase \
  --include="python$version,python$version-dev,python$version-venv" "$suite" "$root" "$mirror"
root=$(cd "$root" && pwd)
libraries=$root/usr/lib/x86_64-linux-gnu
patchelf --set-interpreter "$libraries/ld-linux-x86-64.so.2" --force-rpath \
  --set-rpath "$libraries" "$root/usr/bin/python$version"

# Debian keeps pyconfig.h under /usr/include, which holds the suite's C headers, too: an extension is
# compiled with those of this system.
headers=usr/include/x86_64-linux-gnu/python$version
mkdir -p "$root/usr/include/python$version/x86_64-linux-gnu/python$version"
cp "$root/$headers/pyconfig.h" \
  "$root/usr/include/python$version/x86_64-linux-gnu/python$version/pyconfig.h"
"$root/usr/bin/python$version" -c "import sys; print(sys.executable, sys.version)"

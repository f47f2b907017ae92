#!/bin/sh
# check_builds.sh: README's lines of make, of CMake and of meson build a program that runs. MESON: its command, default
# meson. What is not here is skipped with a line.
cd "$(dirname "$0")/../.." || exit 1
out=$PWD/build/check_builds; rm -rf "$out"; mkdir -p "$out"
have() { command -v "$1" > /dev/null 2>&1; }
# From the line that ends with the tool's name to the next such line, or the block's end.
lines() { awk -v tool="$1" 'on && /^```|# [A-Za-z]+$/ { exit } $0 ~ "# " tool "$" { on = 1 } on' README.md; }
start() { # start TOOL: a directory with amp.c, app.c and amp.h; prints its name
    d=$out/$1; mkdir -p "$d"; cp amp.h "$d"
    printf '#define AMP_IMPLEMENTATION\n#include "amp.h"\n' > "$d/amp.c"
    sed '/AMP_IMPLEMENTATION/d; s,\.\./amp\.h,amp.h,' examples/train_small.c > "$d/app.c"
    [ "$(lines "$1" | wc -l)" -ge 3 ] || { echo "README has no lines of $1"; exit 1; }
}
runs() { "$1" | grep -q '^step 500' || { echo "$1 does not run"; exit 1; }; echo "ok: $1"; }

start make; lines make > "$d/Makefile"
make -s -C "$d" && runs "$d/app" || exit 1
start CMake
{ printf 'cmake_minimum_required(VERSION 3.10)\nproject(app C)\n'; lines CMake; } > "$d/CMakeLists.txt"
if have cmake; then
    cmake -S "$d" -B "$d/b" > "$d/log" 2>&1 && cmake --build "$d/b" -v >> "$d/log" 2>&1 || { cat "$d/log"; exit 1; }
    grep -q -e '-O2.* -c .*amp\.c' "$d/log" || { echo "CMake compiles amp.c without -O2"; exit 1; }
    runs "$d/b/app"
    # Without a copy of amp.h: FetchContent takes it from a clone, here from this directory.
    start FetchContent; rm "$d/amp.h"
    { printf 'cmake_minimum_required(VERSION 3.14)\nproject(app C)\n'; lines CMake; lines FetchContent; } > "$d/CMakeLists.txt"
    cmake -S "$d" -B "$d/b" -DFETCHCONTENT_SOURCE_DIR_HEADER="$PWD" > "$d/log" 2>&1 && cmake --build "$d/b" >> "$d/log" 2>&1 ||
        { cat "$d/log"; exit 1; }
    runs "$d/b/app"
else echo "skipped: no cmake"; fi
start meson
{ echo "project('app', 'c')"; lines meson; } > "$d/meson.build"
if have ${MESON:-meson} && have ninja; then
    ${MESON:-meson} setup "$d/b" "$d" > "$d/log" 2>&1 && ninja -v -C "$d/b" >> "$d/log" 2>&1 || { cat "$d/log"; exit 1; }
    grep -q -e '-O2.* -c .*amp\.c' "$d/log" || { echo "meson compiles amp.c without -O2"; exit 1; }
    runs "$d/b/app"
else echo "skipped: no meson"; fi

#!/bin/bash
# Makes a directory that runs wherever it is copied to: programs, backends, the small libraries they
# need, examples. From outside come only what PROVIDED names: the C and C++ run time and CUDA.
#
# usage: bundle/bundle.sh BUILD DIR [host|no-host|chaos]
#
# no-host leaves the host backend and oneDNN out, for a machine that trains on GPUs alone. chaos is a
# bundle that carries the crash campaign (tests/chaos) and its example instead of the other examples and
# whatever belongs to GPUs: DIR/chaos.sh runs it. BUNDLE_FILMS=1 brings liblg-av.so along, which reads films, and with it FFmpeg and 130 MB
# of what that needs. The libraries are found by ldd, so all of them at any depth; the programs' DT_RPATH ($ORIGIN/../lib)
# serves them too. DIR appears whole or not at all.
set -eu
build=$1 dir=$2 kind=${3:-host}
# glibc's parts; libstdc++ and libgcc are left to the machine, because one process cannot have two and
# CUDA's libraries may want the newer one.
PROVIDED='^(linux-vdso|ld-linux.*|lib(c|m|dl|rt|pthread|resolv|util|stdc\+\+|gcc_s))\.so|^lib(cu|nv|nccl)'

new=$dir.new
rm -rf "$new"
mkdir -p "$new/bin" "$new/lib" "$new/licences"
for p in "$build"/bin/*; do
    case ${p##*/} in lg-emoji | lg-emoji-video) continue ;; esac # make the examples' data from this system's fonts
    cp "$p" "$new/bin/"
done
for l in host cuda; do
    case $l-$kind in host-no-host | cuda-chaos) continue ;; esac
    [ ! -f "$build/lib/liblg-$l.so" ] || cp "$build/lib/liblg-$l.so" "$new/lib/"
done
[ "${BUNDLE_FILMS:-0}" = 0 ] || cp "$build/lib/liblg-av.so" "$new/lib/"
if [ "$kind" = chaos ]; then
    mkdir -p "$new/tests/chaos"
    cp "$build"/tests/chaos/* "$new/tests/chaos/"
elif [ -d "$build/gpu/bin" ]; then # tests and benches of the GPU backend, where they were built
    mkdir "$new/gpu"
    cp -r "$build/gpu/bin" "$new/gpu/"
    cp "$build/lib/liblg-ref64.so" "$new/lib/"
    [ ! -d "$build/gpu/late" ] || cp -r "$build/gpu/late" "$new/gpu/"
fi
programs=("$new"/bin/* $(find "$new" -path '*/gpu/bin/*' -o -path '*/tests/chaos/*'))
backends=("$new"/lib/*.so $(find "$new" -path '*/gpu/late/*'))
[ -f "${backends[0]}" ] || { echo "bundle: no backend in $build/lib: make cuda first, where nvcc is" >&2; exit 1; }
strip --strip-debug "${programs[@]}" "${backends[@]}"

# Copies a library under the name it is asked for, with its package's licence.
take() { # NAME PATH
    [ -f "$new/lib/$1" ] && return
    cp -L "$2" "$new/lib/$1"
    local real package
    real=$(readlink -f "$2")
    package=$(dpkg -S "$real" 2>/dev/null || dpkg -S "${real#/usr}" 2>/dev/null || echo unknown:)
    package=${package%%:*}
    if [ -f "/usr/share/doc/$package/copyright" ]; then
        cp -L "/usr/share/doc/$package/copyright" "$new/licences/$package"
    else
        echo "note: no licence text of $1 (package $package) on this machine" >&2
    fi
}
ldd "${programs[@]}" "${backends[@]}" | awk '$2 == "=>" { print $1, $3 }' | sort -u >"$new/needed"
while read -r name path; do
    [[ $name =~ $PROVIDED ]] && continue
    if [ "$path" = not ]; then # "not found"
        echo "bundle: $name is not installed" >&2
        exit 1
    fi
    take "$name" "$path"
done <"$new/needed"
rm "$new/needed"
# The proof, with the loader's own eyes: whatever else a program loads lies in the bundle.
new_path=$(realpath "$new")
outside=$(ldd "${programs[@]}" "${backends[@]}" | awk '$2 == "=>" { print $1, $3 }' | sort -u |
    while read -r name path; do
        [[ $name =~ $PROVIDED || $(realpath "$path") == "$new_path"/* ]] || echo "$name ($path)"
    done)
if [ -n "$outside" ]; then
    echo "bundle: from outside come $outside: linked without DT_RPATH? make clean, then again" >&2
    exit 1
fi
cp LICENSE "$new/licences/lg"

example() { # FILE_OR_FOLDER...
    local f
    for f in "$@"; do
        mkdir -p "$new/${f%/*}"
        cp -r "$f" "$new/$f"
    done
}
mkdir -p "$new/docs"
cp README.md "$new/"
cp docs/*.md "$new/docs/"
if [ "$kind" = chaos ]; then
    example examples/micro
    cp tests/chaos/chaos.sh "$new/"
    cp tests/chaos/notes.md "$new/tests/chaos/"
    commit=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)
    git diff --quiet HEAD 2>/dev/null || commit+=+
    echo "$commit" >"$new/commit"
else # examples without what is made for them
    example examples/*.toml examples/*/*.toml examples/*/*.md examples/emoji/vae examples/emoji/text_encoder examples/emoji-unet/unet
    mkdir -p "$new/gpu"
    cp tests/gpu/*.sh tests/gpu/*.py tests/chaos/nets.py "$new/gpu/"
fi
rm -rf "$dir"
mv "$new" "$dir"
echo "$(du -sm "$dir" | cut -f1) MiB in $dir: $(ls "$dir/bin" | wc -l) programs, $(ls "$dir/lib" | wc -l) libraries"

#!/bin/bash
# The bundle, moved to another place, in a root directory that holds nothing but the C and C++ run time:
# doctor is content, a run trains to its end with the bits of an undisturbed run outside.
. "$(dirname "$0")/lib.sh"
N=20
if ! unshare -m true 2>/dev/null; then
    skip "a bare root directory" "mount namespaces are not allowed here"
    exit 0
fi
check "it is made" sh -c "cd '$e2e_root' && bundle/bundle.sh '$e2e_build' '$T/lg' host"
[ $e2e_failed -eq 0 ] || exit 1

# The same paths inside as outside, so that the processes are found and ended like others.
root=$T/root
inside=$root$T/moved/here
mkdir -p "$inside" "$root/proc" "$root/dev" "$root/tmp" "$root/lib64" "$root$T/r"
mv "$T/lg" "$inside/lg"
ldd "$inside"/lg/bin/* "$inside"/lg/lib/*.so | awk '$2 == "=>" { print $3 } $1 ~ /ld-linux/ { print $1 }' |
    grep -v -e "^$root" -e '/lib\(cu\|nv\|nccl\)' | sort -u | while read -r l; do
    mkdir -p "$root$(dirname "$l")"
    cp -L "$l" "$root$l"
done
(cd "$root" && find . -name '*.so*' -not -path ".$T/*" -printf '%f\n' | sort) >"$T/outside"
check "from outside: the C and C++ run time" sh -c \
    "! grep -vE '^(ld-linux.*|lib(c|m|dl|rt|pthread|resolv|stdc\+\+|gcc_s))\.so' '$T/outside'"
cp -r "$MICRO" "$inside/made"
sed "s|\.\./\.\./examples/micro/||" "$TINY" >"$inside/tiny.toml"

bare() { # COMMAND...: in the bare root
    unshare -m sh -c 'mount -t proc proc "$0/proc" && mount --rbind /dev "$0/dev" && exec chroot "$0" "$@"' \
        "$root" "$@"
}
check "doctor" timeout 120 bash -c "$(declare -f bare); root=$root; bare $T/moved/here/lg/bin/lgsup doctor"
timeout -k 5 600 bash -c "$(declare -f bare); root=$root
    bare $T/moved/here/lg/bin/lgsup start $T/moved/here/tiny.toml --set job.dir=$T/run --set trainer.max_steps=$N" \
    >"$T/run.out" 2>&1 </dev/null
expect "a run in it" 0 $?
[ $e2e_failed -eq 0 ] || tail -n 5 "$T/run.out"
reference $N
check "byte-identical to a run from the build folder" same_files "$reference" "$root$T/run" $N

#!/bin/sh
# check_mpi.sh: k ranks of examples/train_mpi.c end with the bits of one process with k micro-batches, steps skipped
# in between; with 16-bit gradients all ranks end alike; where a rank dies, the others' logger tells of it.
# It needs Open MPI (openmpi-bin, libopenmpi-dev). With the word demo it only trains, by 1 to 4 ranks.
cd "$(dirname "$0")/.." || exit 1
out=build/check_mpi; mkdir -p $out
command -v mpicc > /dev/null && command -v mpirun > /dev/null || { echo "skipped: MPI is not here"; exit 0; }
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
make -s build/impl.o || exit 1
mpicc -std=c99 -O2 -Wall -Wextra -pedantic -DAMPI_IMPLEMENTATION_ONCE examples/train_mpi.c build/impl.o -o $out/train_mpi -lm -pthread || exit 1

if [ "$1" = demo ]; then
    for k in 1 2 3 4; do
        echo "$k ranks"; mpirun --oversubscribe -np $k $out/train_mpi || exit 1
    done
    exit 0
fi

train() { # train RANKS OPTIONS...: what all ranks printed
    ranks=$1; shift
    timeout 300 mpirun --oversubscribe -np $ranks $out/train_mpi --overflow --steps 50 "$@" > $out/said 2> $out/told ||
        { cat $out/said $out/told; return 1; }
}
ends() { # the line that all ranks end with, but for the rank; several lines where they differ
    sed -n 's/^\(weights .*\)  rank.*/\1/p' $out/said | sort -u
}
for options in "--level O0" "--level O2" "--level O2 --grads f16" "--level O2 --grads bf16"; do
    for k in 1 2 3 4; do
        train 1 --micro $k $options || exit 1
        one=$(ends)
        train $k --bucket 1 $options || exit 1
        all=$(ends)
        echo "$options, $k ranks: $all"
        [ "$(grep -c '^weights' $out/said)" = $k ] && [ "$(echo "$all" | wc -l)" = 1 ] || { echo "the ranks differ"; exit 1; }
        case $all in *"skipped 0"*) echo "no step was skipped"; exit 1;; esac
        # Sums that begin behind the backward pass give the same bits.
        [ $k -ne 3 ] || { train 3 --bucket 0 $options && [ "$(ends)" = "$all" ]; } || { echo "the buckets show"; exit 1; }
        # Micro-batches are added before a 16-bit gradient is rounded, those of ranks after.
        case $options in *grads*) continue;; esac
        [ "$one" = "$all" ] || { echo "one process, $k micro-batches: $one"; exit 1; }
    done
done

# Left alone, mpirun ends the others before they see anything.
timeout 60 mpirun --oversubscribe -np 3 $out/train_mpi --die 5 > $out/said 2>&1 && { echo "a rank died, and mpirun succeeded"; exit 1; }
grep -q 'exited on signal 9' $out/said || { cat $out/said; exit 1; }
timeout 60 mpirun --oversubscribe --enable-recovery -np 3 $out/train_mpi --die 5 --patience 3 > $out/said 2>&1
[ "$(grep -c '^amp: train step: the sum of .* over the ranks failed' $out/said)" = 2 ] ||
    { cat $out/said; echo "a rank died, and the loggers of two others did not tell"; exit 1; }
echo "a rank that dies ends all; with --enable-recovery the others tell: $(grep -m 1 '^amp: train step' $out/said)"

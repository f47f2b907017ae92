#!/bin/sh
# run.sh LESSON DIRECTORY: runs one compiled lesson. Its picture goes to the directory, its table to LESSON.txt and the
# terminal. Fails if the lesson does: what it is to show did not come out.
name=$(basename "$1")
echo "=== $name"
export OMP_WAIT_POLICY=passive    # threads that wait leave the processor to others
"$1" "$2/$name.svg" > "$1.txt"
status=$?
cat "$1.txt"
echo
exit $status

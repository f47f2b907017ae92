#!/bin/sh
# check_examples.sh [DATA]: every example runs and prints something; the demo writes its picture and refuses bad input
# with one sentence. One, own_loop, is compiled alone as well, as README tells a user to.
out=build/check_examples; mkdir -p $out
make -s build/demo build/impl.o || exit 1
built() { # built EXAMPLE PROGRAM
    ${CC:-cc} -std=c99 -O2 -Wall -Wextra -pedantic -DAMPI_IMPLEMENTATION_ONCE -Iexamples -Iexamples/lessons $1.c \
        build/impl.o -o $out/$2 -lm || exit 1
}
built examples/gpt gpt
for e in train_small fit_lenet own_loop_fp32 own_loop manual_lenet report custom gan fgsm; do
    built examples/$e $e
    $out/$e > $out/printed.txt && [ -s $out/printed.txt ] || { echo "$e printed nothing or failed"; exit 1; }
done
${CC:-cc} -std=c99 -DAMP_NO_SIMD -O1 examples/own_loop.c -o $out/alone -lm && [ -n "$($out/alone)" ] ||
    { echo "own_loop does not compile alone"; exit 1; }
# The lessons find what they are to find, and draw the pictures of the book; those of 11 show times.
mkdir -p $out/lessons
make -s lessons LESSONS_TO=$out/lessons > $out/lessons.txt || { tail -n 30 $out/lessons.txt; exit 1; }
for picture in examples/lessons/*.svg; do
    drawn=$out/lessons/$(basename "$picture")
    [ -s "$drawn" ] && { [ "$(basename "$picture")" = 11_attention.svg ] || cmp "$picture" "$drawn"; } ||
        { echo "make lessons does not draw $picture as it is"; exit 1; }
done
[ "$(grep -c '<svg' $out/lessons/index.html)" -eq "$(cat examples/lessons/*.svg | grep -c '<svg class="ink')" ] ||
    { echo "the page of the lessons lacks a panel of a picture"; exit 1; }
[ "$(grep -c '<code>' $out/lessons/index.html)" -ge "$(cat examples/lessons/[0-9]*.c | wc -l)" ] ||
    { echo "the page of the lessons lacks a program"; exit 1; }
for program in examples/lessons/[0-9]*.c; do
    grep -q '^static const [a-z]* [A-Za-z_]* = .*;  */\* try [0-9.]* to [0-9.]* \*/$' "$program" || { echo "$program has no number to try"; exit 1; }
done
awk 'length > 79 { print FILENAME ": " $0; wide = 1 } END { exit wide }' build/lessons/*.txt ||
    { echo "a line of a table is wider than the page gives it room"; exit 1; }
[ "$(grep -c '<ol' $out/lessons/index.html)" -eq "$((2 * $(find examples/lessons -name '[01]*.c' | wc -l) + 1))" ] ||
    { echo "the page has other lists than exercises and answers of each lesson, and the capstone's"; exit 1; }
# As the page runs them: the same table in WebAssembly, and another one with another number. Needs zig and Node.js.
if command -v node > /dev/null && { command -v zig > /dev/null || ${PYTHON:-python3} -c 'import ziglang' 2> /dev/null; }; then
    sh examples/lessons/web.sh $out/lessons/index.html $out > $out/web.txt || { cat $out/web.txt; exit 1; }
    runs() { # runs LESSON [NAME=VALUE]
        node -e 'const [file, ...args] = process.argv.slice(1), bytes = require("fs").readFileSync(file);
            process.stdout.write(require("./examples/lessons/web.js")(bytes, args[0], args.slice(1)).out)' $out/web/lessons.wasm "$@"
    }
    runs 10 | cmp - build/lessons/10_blocks.txt || { echo "lesson 10 has another table in WebAssembly"; exit 1; }
    runs 1 number=0.5 | grep -q '^E4M3.* 0\.500000  0\.00 %$' || { echo "lesson 1 does not take another number in WebAssembly"; exit 1; }
fi
# A student's copy of a lesson is graded as right, one with a gap as wrong, and nothing tracked is written.
rm -rf $out/mine
grade() { make -s "$@" N=2 SRC=$out/mine/02.c > $out/grade.txt 2>&1; }
grade lesson && grade grade && grep -q '^right: all' $out/grade.txt || { cat $out/grade.txt; exit 1; }
rm $out/mine/02.c
grade lesson GAPS=1 && { echo "a lesson with a gap succeeded"; exit 1; }
grade grade && { echo "a lesson with a gap is graded as right"; exit 1; }
grep -q 'is right, .* was found' $out/grade.txt || { cat $out/grade.txt; exit 1; }
# An exercise is graded by lines that its lesson's own table lacks, at least one of them.
while IFS=. read -r lesson rest; do
    case $lesson in \#* | *[!0-9]*) continue ;; esac
    table=$(echo build/lessons/$(printf '%02d' "$lesson")_*.txt)
    tr -s ' ' < "$table" | grep -qF -- "${rest#* }" || echo "$lesson.${rest%% *}"
done < examples/lessons/graded.txt | sort -u > $out/lacking.txt
[ "$(grep '^[0-9]' examples/lessons/graded.txt | cut -d' ' -f1 | sort -u | cmp - $out/lacking.txt)" = "" ] ||
    { echo "an unchanged lesson answers an exercise"; exit 1; }
sed 's/little = 0\.01;/little = 0.001;/' examples/lessons/02_sums.c > $out/mine/02.c
grade grade EX=3 && grep -q '^right: ' $out/grade.txt || { cat $out/grade.txt; exit 1; }
for exercise in 1 2; do grade grade EX=$exercise && { echo "exercise 2.$exercise is graded as right"; exit 1; }; done
# With a setting that amp.h refuses an example says so and fails.
spoilt() { # spoilt EXAMPLE SETTING VALUE
    sed "s/$2/$3/" examples/$1.c > $out/spoilt.c
    cmp -s examples/$1.c $out/spoilt.c && { echo "$1 has no '$2'"; exit 1; }
    built $out/spoilt spoilt
    $out/spoilt > $out/spoilt.out 2> $out/spoilt.err && { echo "$1 succeeded with $3"; exit 1; }
    [ -s $out/spoilt.err ] || { echo "$1 did not say why it failed with $3"; exit 1; }
}
spoilt report 'growth_interval = 50' 'growth_interval = -50'
spoilt gpt '\.lr = 1e-3f' '.lr = -1e-3f'
spoilt gpt '\.heads = HEADS' '.heads = 5'
spoilt own_loop '\.kind = AMP_ADAMW' '.kind = AMP_ADAMW, .beta1 = 2.0f'
spoilt own_loop 'growth_interval = 100' 'growth_interval = -100'
spoilt train_small '\.batch = 256' '.batch = -1'
spoilt train_small '\.n = 256' '.n = 257'
spoilt gan 'beta1 = 0\.5f' 'beta1 = 1.5f'
spoilt fgsm '\.lr = 0\.003f' '.lr = -0.003f'
spoilt custom '\.count = LENGTH' '.count = 0'
spoilt lessons/02_sums 'little = 0\.01;' 'little = 0.02;'
spoilt lessons/03_gradients '\.lr = 0\.05f' '.lr = -0.05f'
spoilt lessons/04_scale '\.init_scale = scale' '.init_scale = -scale'
spoilt lessons/06_masters '\.momentum = 0\.9f' '.momentum = -0.9f'
spoilt lessons/08_levels '\.batch = BATCH, \.seed' '.batch = -1, .seed'
spoilt lessons/12_same_bits '\.lr = 1e-3f' '.lr = -1e-3f'
# A gpt that was stopped somewhere goes on from its checkpoint, and ends with the weights and the text that it would have had.
rm -f $out/gpt.kept
$out/gpt --steps 300 --keep $out/gpt.kept README.md > $out/gpt.txt 2>&1 & gpt=$!
while kill -0 $gpt 2> /dev/null && [ ! -s $out/gpt.kept ]; do sleep 0.1; done
kill -KILL $gpt 2> /dev/null
wait $gpt 2> /dev/null
[ -s $out/gpt.kept ] || { echo "gpt kept nothing"; exit 1; }
text_of() { sed -e '/^step/d' -e 's/, [0-9]* tokens.s//' "$1"; }
$out/gpt --steps 300 --keep $out/gpt.kept README.md > $out/gpt.resumed || exit 1
$out/gpt --steps 300 --svg $out/gpt.svg README.md > $out/gpt.whole || exit 1
[ "$(text_of $out/gpt.resumed)" = "$(text_of $out/gpt.whole)" ] ||
    { echo "gpt does not go on as if it had never stopped"; exit 1; }
grep -q '^GPT O2 f16: val [23]\.[0-9]* after 300 steps' $out/gpt.whole || { echo "gpt learns nothing"; cat $out/gpt.whole; exit 1; }
grep -q '</svg>' $out/gpt.svg || { echo "gpt wrote no picture"; exit 1; }
refuses() { # one line on stderr, nothing on stdout, status not 0
    "$@" > $out/refused.out 2> $out/refused.err && { echo "accepted: $*"; exit 1; }
    [ "$(wc -l < $out/refused.err)" -eq 1 ] || { echo "$*: not one line:"; cat $out/refused.err; exit 1; }
    [ ! -s $out/refused.out ] || { echo "$*: refused too late"; exit 1; }
}
# It goes on at no other level and with no other number of letters.
refuses $out/gpt O0 --keep $out/gpt.kept README.md
refuses $out/gpt --steps 200 --keep $out/gpt.kept README.md
tr -d x < README.md > $out/other.txt
refuses $out/gpt --keep $out/gpt.kept $out/other.txt
head -c 500 README.md > $out/short.txt
refuses $out/gpt $out/short.txt
refuses $out/gpt $out/no-such-file
refuses $out/gpt f16 README.md another
refuses $out/gpt --steps 0
refuses $out/gpt --no-such-option
rm -f build/demo.svg
build/demo --steps 20 > $out/demo.txt || exit 1
grep -q '</svg>' build/demo.svg || { echo "the demo wrote no picture"; exit 1; }
[ -z "$1" ] || build/demo "$1" --steps 20 > $out/demo.txt || exit 1
refuses $out/report /no/such/directory
$out/report $out > $out/report.txt || exit 1
for picture in healthy vanishing overflow history; do
    grep -q '</svg>' $out/report_$picture.svg || { echo "report wrote no picture $picture"; exit 1; }
done
refuses build/demo /no/such/directory
refuses build/demo --no-such-option
mkdir -p $out/bad && printf 'short' > $out/bad/train-images-idx3-ubyte && refuses build/demo $out/bad
# Where a picture would go stands a directory, a pipe: they stay.
rm -f $out/pipe && mkfifo $out/pipe || exit 1
refuses build/demo --steps 1 --svg $out/bad
refuses build/demo --steps 1 --svg $out/pipe
[ -p $out/pipe ] || { echo "the demo put its picture in the place of a pipe"; exit 1; }
# One image of 2x2 pixels to train with, one of 1x1 to test with.
mkdir -p $out/sizes
printf '\0\0\10\3\0\0\0\1\0\0\0\2\0\0\0\2abcd' > $out/sizes/train-images-idx3-ubyte
printf '\0\0\10\3\0\0\0\1\0\0\0\1\0\0\0\1a' > $out/sizes/t10k-images-idx3-ubyte
printf '\0\0\10\1\0\0\0\1\7' | tee $out/sizes/train-labels-idx1-ubyte > $out/sizes/t10k-labels-idx1-ubyte
refuses build/demo $out/sizes --steps 1
exit 0

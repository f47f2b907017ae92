#!/bin/sh
# class.sh: what make does for a class. A student's programs lie anywhere but here, for instance in mine/.
#   lesson NAME SOURCE BUILD   compiles and runs SOURCE, a version of lesson NAME; its picture goes to BUILD/mine. If
#                              there is no SOURCE, it becomes a copy of the lesson, with gaps if GAPS is set.
#   grade NAME SOURCE BUILD [EXERCISE]
#                              compares its table with that of the lesson, number by number; or looks in it for what the
#                              answer to an exercise says.
#   slides PAGE                writes slides of the page index.html to stdout: per lesson its picture, its table and
#                              the number to check.
book=$(dirname "$0")

# The function that is a gap in NAME; its comment in the lesson says what comes out of it.
gap() {
    case $1 in
        01_*) echo value ;; 02_*) echo stored ;; 05_*) echo train_step ;; 06_*) echo dead_share ;;
        07_*) echo kahan_add ;; 10_*) echo scale_of ;;
    esac
}

start() { # start NAME SOURCE: the lesson, or a stub of it
    mkdir -p "$(dirname "$2")"
    if [ -z "$GAPS" ]; then cp "$book/$1.c" "$2"
    elif [ -z "$(gap "$1")" ]; then echo "lesson ${1%%_*} has no gaps; 1, 2, 5, 6, 7 and 10 have"; exit 1
    else
        awk -v gap="$(gap "$1")" '
            $0 ~ "^static .*[ *]" gap "\\(.*[{]$" {
                print
                print "    /* YOUR TURN: what the comment above says. make grade tells whether it is right. */"
                print "    return 0;"
                inside = 1
            }
            inside && /^}/ { inside = 0 }
            !inside' "$book/$1.c" > "$2"
    fi
    echo "$2 was not there: it is lesson ${1%%_*} now${GAPS:+, with a gap in $(gap "$1")}"
}

build() { # build NAME SOURCE BUILD: BUILD/mine/NAME
    mkdir -p "$3/mine"
    case $1 in
        12_*) $CC $FLAGS -fopenmp -I"$book" "$2" -o "$3/mine/$1" -lm 2> "$3/mine/$1.log" ||
              $CC $FLAGS -I"$book" "$2" -o "$3/mine/$1" -lm ;;
        *) $CC $FLAGS -Wno-unused -Wno-unused-parameter -DAMPI_IMPLEMENTATION_ONCE -I"$book" "$2" "$3/impl.o" -o "$3/mine/$1" -lm ;;
    esac
}

# Numbers of two tables, one by one; times (before "ms") may differ.
compare() {
    awk -v file="$1" '
        function numbers(line, to,    n) {
            gsub(/[0-9.]+ ms/, "", line)
            for (n = 0; match(line, /-?[0-9]+([.][0-9]+)?(e[-+]?[0-9]+)?/); line = substr(line, RSTART + RLENGTH))
                to[++n] = substr(line, RSTART, RLENGTH)
            return n
        }
        {
            there = (getline other < file) > 0
            n = numbers($0, want)
            if (!there || numbers(other, got) != n) { print "line " NR " of the table is another: " (there ? other : "missing"); bad = 1; exit 1 }
            for (i = 1; i <= n; i++) {
                count++
                if (want[i] == got[i]) continue
                print "line " NR ", number " i ": " want[i] " is right, " got[i] " was found, in"
                print "  " other
                bad = 1
                exit 1
            }
        }
        END { if (!bad) print "right: all " count " numbers are those of the lesson" }' "$2"
}

# Is in the table what graded.txt has of this exercise?
exercise() { # exercise LESSON.EXERCISE TABLE
    awk -v which="$1" '
        { text = $0; gsub(/[ \t]+/, " ", text) }
        NR == FNR { if ($1 == which) want[++n] = substr(text, length(which) + 2); next }
        { for (i = 1; i <= n; i++) if (index(text, want[i])) found[i] = 1 }
        END {
            for (i in want) right += found[i]
            if (n == 0) print "exercise " which " has no numbers to grade: compare with answers.md"
            else if (right == n) print "right: the table says what the answer to exercise " which " says"
            else print "not yet: the table does not say what it should after the last change of exercise " which
            exit (n == 0 || right < n)
        }' "$book/graded.txt" "$2"
}

slides() {
    sed '/^<main>/,$d' "$1"
    cat << 'HEAD'
<style>
main { padding: 0; max-width: none }
section { min-height: 100vh; margin: 0; padding: 4vh 5vw; border: 0; scroll-snap-align: start }
html { scroll-snap-type: y mandatory; font-size: 22px }
h2 { font-size: 2rem }
.picture svg { max-width: 46vw; max-height: 80vh }
pre.table { font-size: 15px }
</style>
<main>
HEAD
    awk '
        /^<h2>/ { title = $0; part = 0; shown = 0 }
        /^<div class="picture"/ && title && !shown { shown = 1; part = "picture"; print "<section>" title }
        /^<pre class="table"/ { part = "table"; print "<section>" title }
        /^<h3>The number to check/ { part = "check"; print "<section>" title }
        part { print }
        part == "picture" && /^<\/div>/ { print "</section>"; part = "" }
        part == "table" && /^<\/pre>/ { print "</section>"; part = "" }
        part == "check" && /^<\/p>/ { print "</section>"; part = "" }' "$1"
    sed -n '/^<\/main>/,$p' "$1"
}

case $1 in
    lesson)
        [ -f "$3" ] || start "$2" "$3"
        build "$2" "$3" "$4" || exit 1
        sh "$book/run.sh" "$4/mine/$2" "$4/mine" && echo "picture: $4/mine/$2.svg" ;;
    grade)
        [ -f "$3" ] || { echo "there is no $3"; exit 1; }
        build "$2" "$3" "$4" || exit 1
        [ -f "$4/lessons/$2.txt" ] || sh "$book/run.sh" "$4/lessons/$2" "$4/mine" > "$4/mine/$2.log" || exit 1
        OMP_WAIT_POLICY=passive "$4/mine/$2" "$4/mine/$2.svg" > "$4/mine/$2.txt" 2> "$4/mine/$2.err"
        lesson=${2%%_*}
        if [ -n "$5" ]; then exercise "${lesson#0}.$5" "$4/mine/$2.txt"
        else compare "$4/mine/$2.txt" "$4/lessons/$2.txt"; fi ;;
    slides) slides "$2" ;;
esac

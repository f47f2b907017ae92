/* test_files.c - processes that save to one path and load from it at the same time: every save and every load succeeds,
   each load sees one whole file, and no temporary file stays. */
#if defined(_WIN32)
  #include <direct.h>
  #include <process.h>
#else
  #define _XOPEN_SOURCE 700
  #include <sys/stat.h>
  #include <sys/types.h>
  #include <sys/wait.h>
  #include <unistd.h>
#endif
#include "../amp.h"
#include "test.h"

enum { SAVERS = 3, LOADERS = 2, ROUNDS = 200, ELEMENTS = 20000 };
static float data[ELEMENTS];
static char folder[300], path[320];

static amp_file_tensor tensor_of(float* x) {
    amp_file_tensor t;
    memset(&t, 0, sizeof t);
    t.tensor.data = x;
    t.tensor.name = "x";
    t.tensor.count = t.shape[0] = ELEMENTS;
    t.rank = 1;
    return t;
}

static void hear(amp_result code, const char* sentence, void* user_data) {
    (void)code;
    if (++*(int*)user_data == 1) { printf("%s\n", sentence); fflush(stdout); }
}

/* One value in all elements, and a header whose length differs from round to round. Returns how many saves failed. */
static int save_rounds(int rounds) {
    char padding[200];
    int failed = 0, told = 0, i, k;
    amp_file_tensor t = tensor_of(data);
    amp_file_text text = { "padding", padding };
    amp_logger logger;
    amp_file_desc d;
    memset(&d, 0, sizeof d);
    logger.log = hear;
    logger.user_data = &told;
    d.logger = &logger;
    for (i = 1; i <= rounds; i++) {
        for (k = 0; k < ELEMENTS; k++) data[k] = (float)i;
        memset(padding, 'x', sizeof padding);
        padding[i * 37 % 199] = 0;
        failed += amp_file_save(path, &t, 1, &text, 1, &d) != AMP_OK;
    }
    return failed;
}

/* Returns how many loads failed, or were of a mixture of files. */
static int load_rounds(int rounds) {
    int failed = 0, told = 0, i, k, same;
    amp_file_tensor t = tensor_of(data);
    amp_logger logger;
    amp_file_desc d;
    memset(&d, 0, sizeof d);
    logger.log = hear;
    logger.user_data = &told;
    d.logger = &logger;
    for (i = 0; i < rounds; i++) {
        memset(data, 0, sizeof data);
        same = amp_file_load(path, &t, 1, &d) == AMP_OK && data[0] >= 1.0f;
        for (k = 1; k < ELEMENTS; k++) same = same && data[k] == data[0];
        failed += !same;
    }
    return failed;
}

static int play(const char* role) {
    int failed = role[0] == 's' ? save_rounds(ROUNDS) : load_rounds(2 * ROUNDS);
    if (failed) printf("%s: %d failed\n", role, failed);
    fflush(stdout);
    return failed ? 1 : 0;
}

/* A process that plays a role, and its exit status. */
#if defined(_WIN32)
typedef intptr_t process;
static process start(const char* program, const char* role) {
    return _spawnl(_P_NOWAIT, program, program, role, folder, (const char*)NULL);
}
static int status_of(process p) {
    int status = 1;
    return _cwait(&status, p, 0) == p ? status : 1;
}
#else
typedef pid_t process;
static process start(const char* program, const char* role) {
    process p;
    (void)program;
    fflush(stdout);
    p = fork();
    if (p == 0) _exit(play(role));
    return p;
}
static int status_of(process p) {
    int status = 1;
    return waitpid(p, &status, 0) == p && WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}
#endif

static const char* program;
static void test_savers_and_loaders(void) {
    process all[SAVERS + LOADERS];
    int i;
    CHECK(save_rounds(1) == 0);
    for (i = 0; i < SAVERS + LOADERS; i++) all[i] = start(program, i < SAVERS ? "save" : "load");
    for (i = 0; i < SAVERS + LOADERS; i++) CHECK_MSG(status_of(all[i]) == 0, "process %d", i);
    CHECK(load_rounds(1) == 0 && remove(path) == 0);
#if defined(_WIN32)
    CHECK_MSG(_rmdir(folder) == 0, "%s is not empty", folder);
#else
    CHECK_MSG(rmdir(folder) == 0, "%s is not empty", folder);
#endif
}

int main(int argc, char** argv) {
    const char* parent = getenv("TMPDIR");
    program = argv[0];
#if defined(_WIN32)
    snprintf(folder, sizeof folder, "%.200s/amp_files_%d", parent ? parent : ".", _getpid());
    if (argc > 2) snprintf(folder, sizeof folder, "%.290s", argv[2]);
    else if (_mkdir(folder) != 0) return 1;
#else
    if (!parent) parent = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";   /* in memory: every save is synced */
    snprintf(folder, sizeof folder, "%.200s/amp_files_%ld", parent, (long)getpid());
    if (mkdir(folder, 0700) != 0) return 1;
#endif
    snprintf(path, sizeof path, "%s/x.safetensors", folder);
    if (argc > 2) return play(argv[1]);
    TEST(test_savers_and_loaders);
    TEST_END();
}

/* A library to be preloaded: counts the file-system operations of a process below one folder, and at one of them kills
   the process or lets the operation fail. It is armed by `fault_arm`, in the process or before a fork.

   gcc -shared -fPIC -O1 -o faulty_io.so faulty_io.c -ldl */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { KILL = -1, SHORT = -2 }; /* else the error number that the operation fails with */

static char root[PATH_MAX];
static long at, done; /* the operation to hit, counted from 1 (0: none), and how many there were */
static int how, reads;
static char what[PATH_MAX + 64];

/* with_reads: count opening for reading and reads too; otherwise only what changes the file system */
void fault_arm(const char *folder, long number, int action, int with_reads) {
    strncpy(root, folder, PATH_MAX - 1);
    at = number, how = action, reads = with_reads, done = 0, what[0] = 0;
}

long fault_count(void) { return done; }
const char *fault_what(void) { return what; }

/* Whether this operation is the one; -1: it fails now with errno set, -2: it is to be done in part */
static int hit(const char *name, const char *path) {
    if (!root[0] || !path || strncmp(path, root, strlen(root)) || __atomic_add_fetch(&done, 1, __ATOMIC_RELAXED) != at) return 0;
    snprintf(what, sizeof what, "%s %s", name, path);
    if (how == KILL) kill(getpid(), SIGKILL);
    if (how == SHORT) return -2;
    errno = how;
    return -1;
}

static const char *absolute(int folder, const char *path, char *out) {
    char base[64], where[PATH_MAX];
    if (!path || path[0] == '/') return path;
    if (folder == AT_FDCWD) { if (!getcwd(where, sizeof where)) return path; }
    else {
        snprintf(base, sizeof base, "/proc/self/fd/%d", folder);
        ssize_t n = readlink(base, where, sizeof where - 1);
        if (n < 0) return path;
        where[n] = 0;
    }
    if (strlen(where) + strlen(path) + 2 > PATH_MAX) return path;
    sprintf(out, "%s/%s", where, path);
    return out;
}

static const char *of(int file, char *out) {
    char link[64];
    if (!root[0]) return NULL;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t n = readlink(link, out, PATH_MAX - 1);
    if (n < 0) return NULL;
    out[n] = 0;
    return out;
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

#define OPEN(name, folder_arg, folder, ...)                                                                   \
    int name(folder_arg const char *path, int flags, ...) {                                                   \
        REAL(name);                                                                                           \
        mode_t mode = 0;                                                                                      \
        char full[PATH_MAX];                                                                                  \
        if (flags & (O_CREAT | __O_TMPFILE)) {                                                                \
            va_list list; va_start(list, flags); mode = va_arg(list, mode_t); va_end(list);                   \
        }                                                                                                     \
        int writes = (flags & O_ACCMODE) != O_RDONLY || flags & (O_CREAT | O_TRUNC);                          \
        if ((writes || (reads && !(flags & O_DIRECTORY)))                                                     \
            && hit(writes ? "open for writing" : "open", absolute(folder, path, full)) == -1) return -1;      \
        return real(__VA_ARGS__ path, flags, mode);                                                           \
    }
#define NOTHING
#define COMMA ,
OPEN(open, NOTHING, AT_FDCWD, )
OPEN(open64, NOTHING, AT_FDCWD, )
#define FOLDER int folder,
OPEN(openat, FOLDER, folder, folder,)
OPEN(openat64, FOLDER, folder, folder,)

#define PATH1(name)                                                                                           \
    int name(const char *path) {                                                                              \
        REAL(name); char full[PATH_MAX];                                                                      \
        return hit(#name, absolute(AT_FDCWD, path, full)) == -1 ? -1 : real(path);                            \
    }
PATH1(unlink)
PATH1(rmdir)

#define PATH_MODE(name)                                                                                       \
    int name(const char *path, mode_t mode) {                                                                 \
        REAL(name); char full[PATH_MAX];                                                                      \
        return hit(#name, absolute(AT_FDCWD, path, full)) == -1 ? -1 : real(path, mode);                      \
    }
PATH_MODE(mkdir)
PATH_MODE(chmod)

int unlinkat(int folder, const char *path, int flags) {
    REAL(unlinkat); char full[PATH_MAX];
    return hit("unlinkat", absolute(folder, path, full)) == -1 ? -1 : real(folder, path, flags);
}

int rename(const char *from, const char *to) {
    REAL(rename); char full[PATH_MAX];
    return hit("rename", absolute(AT_FDCWD, to, full)) == -1 ? -1 : real(from, to);
}

int renameat(int a, const char *from, int b, const char *to) {
    REAL(renameat); char full[PATH_MAX];
    return hit("rename", absolute(b, to, full)) == -1 ? -1 : real(a, from, b, to);
}

#define FILE1(name)                                                                                           \
    int name(int file) {                                                                                      \
        REAL(name); char full[PATH_MAX];                                                                      \
        return hit(#name, of(file, full)) == -1 ? -1 : real(file);                                            \
    }
FILE1(fsync)
FILE1(fdatasync)

int ftruncate(int file, off_t size) {
    REAL(ftruncate); char full[PATH_MAX];
    return hit("ftruncate", of(file, full)) == -1 ? -1 : real(file, size);
}

int ftruncate64(int file, off64_t size) {
    REAL(ftruncate64); char full[PATH_MAX];
    return hit("ftruncate", of(file, full)) == -1 ? -1 : real(file, size);
}

#define PART(size, result) (result == -2 && size > 1 ? size / 2 : size)

ssize_t write(int file, const void *data, size_t size) {
    REAL(write); char full[PATH_MAX];
    int result = hit("write", of(file, full));
    return result == -1 ? -1 : real(file, data, PART(size, result));
}

ssize_t pwrite64(int file, const void *data, size_t size, off64_t offset) {
    REAL(pwrite64); char full[PATH_MAX];
    int result = hit("write", of(file, full));
    return result == -1 ? -1 : real(file, data, PART(size, result), offset);
}

ssize_t writev(int file, const struct iovec *parts, int count) {
    REAL(writev); char full[PATH_MAX];
    return hit("write", of(file, full)) == -1 ? -1 : real(file, parts, count);
}

ssize_t read(int file, void *data, size_t size) {
    REAL(read); char full[PATH_MAX];
    int result = reads ? hit("read", of(file, full)) : 0;
    return result == -1 ? -1 : real(file, data, PART(size, result));
}

ssize_t pread64(int file, void *data, size_t size, off64_t offset) {
    REAL(pread64); char full[PATH_MAX];
    int result = reads ? hit("read", of(file, full)) : 0;
    return result == -1 ? -1 : real(file, data, PART(size, result), offset);
}

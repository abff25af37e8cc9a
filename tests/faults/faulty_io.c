/* A library to be preloaded: counts the file-system operations of a process below one folder, and at one of them kills
   the process or lets the operation fail. It is armed by `fault_arm`, in the process or before a fork. With
   `fault_record` it writes every operation that succeeded, and the bytes written, to a file (tests/faults/power_loss.py).

   gcc -shared -fPIC -O1 -o faulty_io.so faulty_io.c -ldl */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { KILL = -1, SHORT = -2 }; /* else the error number that the operation fails with */

static char root[PATH_MAX];
static long at, done; /* the operation to hit, counted from 1 (0: none), and how many there were */
static int how, reads;
static char what[PATH_MAX + 64];
static int tape = -1;  /* descriptor of the record */
static int trace = -1; /* of a list of what was counted */

/* with_reads: count opening for reading and reads too; otherwise only what changes the file system */
void fault_arm(const char *folder, long number, int action, int with_reads) {
    strncpy(root, folder, PATH_MAX - 1);
    at = number, how = action, reads = with_reads, done = 0, what[0] = 0;
}

void fault_trace(int file) { trace = file; }
const char *fault_what(void) { return what; }

/* Whether this operation is the one; -1: it fails now with errno set, -2: it is to be done in part */
static int hit(const char *name, const char *path) {
    if (!root[0] || !path || strncmp(path, root, strlen(root))) return 0;
    if (trace >= 0) dprintf(trace, "%s %s\n", name, path);
    if (__atomic_add_fetch(&done, 1, __ATOMIC_RELAXED) != at) return 0;
    snprintf(what, sizeof what, "%s %s", name, path);
    if (how == KILL) kill(getpid(), SIGKILL);
    if (how == SHORT) return -2;
    errno = how;
    return -1;
}

void fault_record(const char *folder, int file) { fault_arm(folder, 0, 0, 0), tape = file; }

/* A record: name, number of the file, offset, lengths of path and data, a line break; then both. A rename's data is the
   name before. The number tells who gave a name past the C library, as the writer of safetensors does. */
static void record(const char *name, const char *path, long offset, const void *data, size_t size) {
    if (tape < 0 || !path || strncmp(path, root, strlen(root))) return;
    char line[PATH_MAX + 128];
    struct stat found = {0};
    lstat(path, &found);
    size_t paths = strlen(path);
    int length = sprintf(line, "%s %lu %ld %zu %zu\n%s", name, (unsigned long)found.st_ino, offset, paths, size, path);
    struct iovec parts[] = {{line, length}, {(void *)data, size}};
    syscall(SYS_writev, tape, parts, 2); /* in one piece, whichever thread */
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
        int result = real(__VA_ARGS__ path, flags, mode);                                                     \
        if (result >= 0 && writes)                                                                            \
            record(flags & O_TRUNC ? "create" : "open", absolute(folder, path, full), 0, NULL, 0);            \
        return result;                                                                                        \
    }
#define NOTHING
OPEN(open, NOTHING, AT_FDCWD, )
OPEN(open64, NOTHING, AT_FDCWD, )
#define FOLDER int folder,
OPEN(openat, FOLDER, folder, folder,)
OPEN(openat64, FOLDER, folder, folder,)

/* A name that changed, or a file that was synced; a rename gives the name before. */
static int named(int result, const char *name, const char *path, const char *before) {
    if (result == 0) record(name, path, 0, before, before ? strlen(before) : 0);
    return result;
}

#define PATH1(name)                                                                                           \
    int name(const char *path) {                                                                              \
        REAL(name); char full[PATH_MAX];                                                                      \
        const char *found = absolute(AT_FDCWD, path, full);                                                   \
        return hit(#name, found) == -1 ? -1 : named(real(path), #name, found, NULL);                          \
    }
PATH1(unlink)
PATH1(rmdir)

#define PATH_MODE(name)                                                                                       \
    int name(const char *path, mode_t mode) {                                                                 \
        REAL(name); char full[PATH_MAX];                                                                      \
        const char *found = absolute(AT_FDCWD, path, full);                                                   \
        return hit(#name, found) == -1 ? -1 : named(real(path, mode), #name, found, NULL);                    \
    }
PATH_MODE(mkdir)
PATH_MODE(chmod)

int unlinkat(int folder, const char *path, int flags) {
    REAL(unlinkat); char full[PATH_MAX];
    const char *found = absolute(folder, path, full);
    return hit("unlinkat", found) == -1 ? -1 : named(real(folder, path, flags), "unlink", found, NULL);
}

int rename(const char *from, const char *to) {
    REAL(rename); char full[PATH_MAX], before[PATH_MAX];
    const char *found = absolute(AT_FDCWD, to, full);
    if (hit("rename", found) == -1) return -1;
    return named(real(from, to), "rename", found, absolute(AT_FDCWD, from, before));
}

int renameat(int a, const char *from, int b, const char *to) {
    REAL(renameat); char full[PATH_MAX], before[PATH_MAX];
    const char *found = absolute(b, to, full);
    if (hit("rename", found) == -1) return -1;
    return named(real(a, from, b, to), "rename", found, absolute(a, from, before));
}

DIR *opendir(const char *path) {
    REAL(opendir); char full[PATH_MAX];
    return reads && hit("opendir", absolute(AT_FDCWD, path, full)) == -1 ? NULL : real(path);
}

#define FILE1(name)                                                                                           \
    int name(int file) {                                                                                      \
        REAL(name); char full[PATH_MAX];                                                                      \
        const char *found = of(file, full);                                                                   \
        return hit(#name, found) == -1 ? -1 : named(real(file), "fsync", found, NULL);                        \
    }
FILE1(fsync)
FILE1(fdatasync)

#define TRUNCATE(name, type)                                                                                  \
    int name(int file, type size) {                                                                           \
        REAL(name); char full[PATH_MAX];                                                                      \
        const char *found = of(file, full);                                                                   \
        if (hit("ftruncate", found) == -1 || real(file, size)) return -1;                                     \
        record("truncate", found, size, NULL, 0);                                                             \
        return 0;                                                                                             \
    }
TRUNCATE(ftruncate, off_t)
TRUNCATE(ftruncate64, off64_t)

#define PART(size, result) (result == -2 && size > 1 ? size / 2 : size)

/* offset: where the bytes went; -1: just before where the file stands now, whether it was opened to append or not */
static ssize_t wrote(ssize_t size, int file, const char *path, long offset, const void *data) {
    if (size > 0 && tape >= 0) record("write", path, offset < 0 ? lseek(file, 0, SEEK_CUR) - size : offset, data, size);
    return size;
}

ssize_t write(int file, const void *data, size_t size) {
    REAL(write); char full[PATH_MAX];
    const char *found = of(file, full);
    int result = hit("write", found);
    return result == -1 ? -1 : wrote(real(file, data, PART(size, result)), file, found, -1, data);
}

ssize_t pwrite64(int file, const void *data, size_t size, off64_t offset) {
    REAL(pwrite64); char full[PATH_MAX];
    const char *found = of(file, full);
    int result = hit("write", found);
    return result == -1 ? -1 : wrote(real(file, data, PART(size, result), offset), file, found, offset, data);
}

ssize_t writev(int file, const struct iovec *parts, int count) {
    REAL(writev); char full[PATH_MAX];
    const char *found = of(file, full);
    if (hit("write", found) == -1) return -1;
    if (tape < 0 || !found || strncmp(found, root, strlen(root))) return real(file, parts, count);
    ssize_t all = 0;
    for (int i = 0; i < count; i++) { /* one by one, which a record holds */
        ssize_t size = write(file, parts[i].iov_base, parts[i].iov_len);
        if (size < 0) return all ? all : -1;
        all += size;
        if (size < (ssize_t)parts[i].iov_len) break;
    }
    return all;
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

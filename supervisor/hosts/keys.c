/* The key of a cluster; see keys.h. */
#include "supervisor/hosts/keys.h"
#include "base/fs.h"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zmq.h>

enum { FILE_BYTES_MAX = 4096 };

int lg_cluster_key_make(const char *path)
{
    struct lg_cluster_key key;
    char text[256];
    if (zmq_curve_keypair(key.public_, key.secret) != 0)
        return LG_FAIL(LG_ERR_FAILED, "this libzmq was built without CURVE: %s",
                       zmq_strerror(errno));
    const int n =
        snprintf(text, sizeof text, "public = \"%s\"\nsecret = \"%s\"\n", key.public_, key.secret);
    const int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0 && errno == EEXIST)
        return LG_FAIL(LG_ERR_BUSY,
                       "%s is there already: a key is not overwritten, since hosts may use it",
                       path);
    if (fd < 0)
        return LG_FAIL(lg_err_from_errno(errno), "cannot create %s: %s", path, strerror(errno));
    int rc = lg_write_all(fd, text, (size_t)n);
    if (rc == 0 && fsync(fd) < 0) rc = LG_FAIL(LG_ERR_IO, "fsync of %s: %s", path, strerror(errno));
    close(fd);
    explicit_bzero(&key, sizeof key);
    explicit_bzero(text, sizeof text);
    if (rc < 0) unlink(path);
    LG_TRY(rc);
    return 0;
}

/* The text between quotes after `name`. */
static bool take(const char *text, const char *name, char ret[LG_KEY_TEXT])
{
    unsigned char scrap[32];
    const char *at = strstr(text, name);
    const char *from = at ? strchr(at, '"') : NULL;
    if (!from || strcspn(from + 1, "\"") != LG_KEY_TEXT - 1) return false;
    memcpy(ret, from + 1, LG_KEY_TEXT - 1);
    ret[LG_KEY_TEXT - 1] = 0;
    return zmq_z85_decode(scrap, ret) != NULL;
}

int lg_cluster_key_load(const char *path, struct lg_cluster_key *ret)
{
    struct lg_cluster_key key;
    char *text = NULL, public_[LG_KEY_TEXT];
    size_t bytes;
    struct stat st;
    if (stat(path, &st) < 0)
        return LG_FAIL(lg_err_from_errno(errno),
                       "hosts.key: %s: %s (`lgsup keys FILE` makes one for all hosts)", path,
                       strerror(errno));
    if (st.st_uid != geteuid() || st.st_mode & 077)
        return LG_FAIL(LG_ERR_CONFIG,
                       "hosts.key: %s must be its user's own, with mode 0600 (now %04o): chmod 600",
                       path, (unsigned)st.st_mode & 07777);
    LG_TRY(lg_read_file(path, FILE_BYTES_MAX, &text, &bytes));
    const bool good = take(text, "public", key.public_) && take(text, "secret", key.secret) &&
                      zmq_curve_public(public_, key.secret) == 0 && !strcmp(public_, key.public_);
    explicit_bzero(text, bytes);
    free(text);
    if (!good) return LG_FAIL(LG_ERR_CONFIG, "hosts.key: %s is not a key of `lgsup keys`", path);
    *ret = key;
    return 0;
}

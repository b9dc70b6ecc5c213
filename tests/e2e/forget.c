/* forget KEEPER REGION: zeroes everything behind the head of a region, as if its memory were new.
 * KEEPER: path of the keeper's socket. For runs whose processes that map it are dead. */
#include "shm/keeper.h"
#include "shm/region.h"
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

int main(int argc, char **argv)
{
    uint64_t bytes;
    int fd;
    struct stat st;
    if (argc != 3 || lg_keeper_get(argv[1], argv[2], &bytes, &fd) < 0 || fstat(fd, &st) < 0) {
        fprintf(stderr, "usage: forget KEEPER REGION: %s\n", lg_err_message());
        return 1;
    }
    char *at = mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) return 1;
    memset(at + LG_PAGE_BYTES, 0, (size_t)st.st_size - LG_PAGE_BYTES);
    return 0;
}

/* The machines of a run of several hosts, as a command on one of them sees them: what this host's board says of each,
 * and what they answer to questions (supervisor/hosts/question.h). Waiting has a limit; who does not answer is shown
 * with how long it has been silent. */
#pragma once
#include "base/fs.h"
#include "supervisor/hosts/places.h"
#include "supervisor/hosts/question.h"

struct lg_machine {
    int place, host; /* host -1: has no number */
    char address[LG_HOST_ADDRESS_BYTES];
    bool own, leads;
    bool wanted;       /* of all, or the one that --host names */
    int64_t silent_ms; /* as this host's lgsup has it; -1: not known */
    /* of the last question: */
    bool answered, under_way, more;
    uint32_t phase; /* lg_group_phase */
    int code;
    char *text; /* ends with a NUL */
    size_t bytes;
};

typedef struct lg_elsewhere {
    char dir[LG_PATH_BYTES];
    int n, own, count; /* machines, this one, hosts of the run */
    struct lg_machine machine[LG_PLACES_MAX];
    uint64_t lineage, last_id;
    struct lg_asking *asking; /* (n) */
    lg_channel *channel;
    unsigned char *buffer; /* (LG_ANSWER_BYTES_MAX) */
} lg_elsewhere;

/* host: of --host, NULL for all. *ret NULL: the run in dir has one host. LG_ERR_USAGE: no such host; LG_ERR_NOTFOUND: no
 * machine has its number now; others: the list, the key. */
int lg_elsewhere_open(const char *dir, const char *host, lg_elsewhere **ret);
void lg_elsewhere_close(lg_elsewhere **e);

/* What this host's board says of the others now: who has which number, who is silent. */
void lg_elsewhere_look(lg_elsewhere *e);
/* A question to machine i, which is not this one; magic, id and the like are filled in. It goes out with the next wait. */
void lg_elsewhere_put(lg_elsewhere *e, int i, const struct lg_question *q);
/* The same to all others that are wanted, after a look. */
void lg_elsewhere_put_all(lg_elsewhere *e, const struct lg_question *q);
/* Until all have answered, or for limit_ms; for one that is known to be silent it is less. An order that is under way is
 * waited for as long as its host says so. */
void lg_elsewhere_wait(lg_elsewhere *e, int limit_ms);

enum { LG_MACHINE_NAME_BYTES = 112, LG_MACHINE_WHY_BYTES = 300 };
/* "host 1 (10.77.0.2), leads" */
const char *lg_machine_name(const struct lg_machine *m, char ret[LG_MACHINE_NAME_BYTES]);
/* Why it shows nothing; NULL: it has answered with a text. */
const char *lg_machine_why_not(const struct lg_machine *m, char ret[LG_MACHINE_WHY_BYTES]);
/* A number that no machine has now, from `from` on; -1: none. */
int lg_elsewhere_missing(const lg_elsewhere *e, int from);

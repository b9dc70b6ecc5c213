/* A checkpoint becomes visible: RUN/checkpoints/<name>_step<N>.
 *
 * Everything goes into checkpoints/.tmp-<name>_step<N>, each file fsynced, the manifest last; then
 * rename and fsync of checkpoints/. Before the rename the records of the steps up to N (ledger,
 * metrics.jsonl) are made durable: a checkpoint whose history is lost would prove nothing.
 *
 * After return 0 the checkpoint survives a power cut, and only then may an older one go
 * (retention.h). After a failure, a kill or a power cut at any point the older ones are untouched
 * and another call for the same state does it again; a complete directory with the same files
 * counts as done. A complete one of another lineage under this name, which somebody has put there, is
 * renamed to NAME_stepN.of-LINEAGE.K, durably before ours takes the name, and never removed.
 *
 * Several hosts may publish the same state into one folder at once (one that was shut out goes on writing until it hears
 * of it): each writes a directory of its own name, one of the renames succeeds, and the others find the same files under
 * the name, and are done. A complete checkpoint is never replaced. tests/unit/test_sim_disk.c cuts the power at every write, rename and fsync. */
#pragma once
#include "stages/ckpt/checkpoint.h"

struct lg_publishing {
    const char *run_dir;
    /* Of several hosts that write into one folder: this one's, in the name of what is half written; NULL: nobody else
     * writes there. */
    const char *writer;
    struct lg_contents contents;
};

/* m: everything but the files, which are added. ret_dir gets the directory's path. */
int lg_checkpoint_publish(const struct lg_publishing *p, lg_manifest *m,
                          char ret_dir[LG_PATH_BYTES]);

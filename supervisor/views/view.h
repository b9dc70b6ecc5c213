/* What the views are shown of a run that lgsup supervises: made anew at every turn of its loop. */
#pragma once
#include "shm/board.h"
#include "supervisor/run/run.h"

struct lg_view {
    const lg_run *run;
    lg_board *board;
    bool announced; /* every role has been ready */
    bool ending;    /* it drains, or later: nothing but the end matters */
    bool leaving;   /* processes are told to leave, or later */
    struct {
        int all, well; /* instances that are to stay, and those of them that are ready or done */
    } role[LG_ROLE_COUNT];
};

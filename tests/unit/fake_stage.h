/* Stages that follow the step protocol without computing: for tests of the supervisor.
 *
 * A test program whose name begins with "lg-" (a symbolic link to it in $LG_BIN_DIR) calls
 * fake_stage_main. Trainer state is one number per side in real regions: every step checks that the
 * number is what the step before has left, so memory that gets lost is noticed (the run parks). */
#pragma once

/* argv[0] is "lg-<role>", "lg-keeper", "lg-sample" or "lg-histogram". Returns the exit code.
 *
 * A file RUN/fault "ROLE INDEX KIND" makes that instance misbehave while the file is there:
 *   crash   exits with 5 while it sets up
 *   park    gives up with LG_ERR_PARKED
 *   hang    stops beating, once (the file is removed first)
 *   unready never becomes ready, once
 * A file RUN/sample_fault "crash" or "hang" does so to lg-sample. */
int fake_stage_main(int argc, char **argv);

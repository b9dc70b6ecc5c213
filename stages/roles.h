/* The stages' definitions, one per program lg-<role>; stages/<role>/main.c hands its own to
 * lg_stage_main. */
#pragma once
#include "stages/stage.h"

extern const struct lg_stage_def lg_loader_def, lg_text_def, lg_vae_def, lg_trainer_def, lg_ema_def,
    lg_ckpt_def, lg_exchange_def;

/* A data set looked over without a run: what `lgsup data` prints (`lg-loader --look DIR|CONFIG`). */
#pragma once
#include "config/plan.h"
#include "stages/io/order.h"

/* The order of samples of a run with buckets. size: (count). */
int lg_loader_order(const lg_plan *p, const struct lg_item_size *size, uint64_t count,
                    lg_order **ret);

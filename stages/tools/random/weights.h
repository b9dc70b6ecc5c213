/* Files of random weights. */
#pragma once
#include "stages/nets/params.h"
#include "stages/tools/random/model.h"
#include <stdbool.h>

/* A uniform distribution of this standard deviation. */
void lg_random_set_deviation(struct lg_param *p, double deviation);
/* Inputs of one of its outputs. */
double lg_random_fan_in(const struct lg_param *p);
bool lg_random_ends_with(const struct lg_param *p, const char *end); /* its name */

/* The parameters of t as DIR/NAME in the model's type. They are drawn as they are written: a T5-XXL need not fit in
 * memory. */
int lg_random_weights_write(const struct lg_random_model *m, const char *name, const lg_params *t);

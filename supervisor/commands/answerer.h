/* What this host says of itself when a command on another one asks (supervisor/hosts/question.h): the same that the
 * command would say here. */
#pragma once
#include "supervisor/hosts/answers.h"

/* Of the run in dir. It is never freed: a worker that hangs may still use it. LG_ERR_NOSPACE. */
int lg_answerer_make(const char *dir, struct lg_answerer *ret);

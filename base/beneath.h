/* Files in a folder that others have filled: links are followed as long as they lead to places inside
 * the folder, never out of it. */
#pragma once
#include "base/check.h"

/* Does `path`, all links followed, lie inside `folder` (or is it)? A link that leads nowhere does not.
 * False with *ret_errno 0: it lies outside or is not there; else the system could not tell. */
bool lg_is_beneath(const char *folder, const char *path, int *ret_errno);
/* Opens folder/relative for reading, close-on-exec. -1 with errno: EXDEV when it lies outside, whatever
 * the name looked like before or looks like a moment later. */
int lg_open_beneath(const char *folder, const char *relative);

/* What a program inherits from whoever starts it (a shell, cron, a daemon, another program) and relies on.
 * Called first of all, before a file is opened: a closed stdin, stdout or stderr would give its number to the next
 * file, which what is printed would then be written into. They lead nowhere instead. SIGCHLD has its default
 * action, since of children that it is ignored for no exit status is left; SIGXFSZ is ignored, so that a file at
 * `ulimit -f` is an error (EFBIG) of whoever writes it. */
#pragma once

void lg_inherit(void);

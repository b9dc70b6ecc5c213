/* lgsup: the one program that a user calls. */
#include "base/inherit.h"
#include "supervisor/commands/cli.h"
#include "supervisor/run/signals.h"

int main(int argc, char **argv)
{
    lg_inherit();
    lg_signals_inherit();
    return lg_cli_main(argc, argv);
}

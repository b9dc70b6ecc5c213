/* lgsup: the one program that a user calls. */
#include "supervisor/commands/cli.h"

int main(int argc, char **argv)
{
    lg_cli_inherit();
    return lg_cli_main(argc, argv);
}

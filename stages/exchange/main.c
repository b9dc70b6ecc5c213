#include "stages/roles.h"

int main(int argc, char **argv)
{
    return lg_stage_main(argc, argv, &lg_exchange_def);
}

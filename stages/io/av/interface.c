/* Which headers liblg-av.so was built from: the Makefile takes their sum. */
__attribute__((visibility("default"))) extern const char *const lg_av_interface;
const char *const lg_av_interface = LG_AV_INTERFACE;

/* Group fixtures for tests that compute on the ref64 backend. */
#pragma once
#include "kernels/device.h"

extern lg_device *g_device;
extern lg_stream *g_stream;

/* What fails is printed. */
int ref64_open(void **state);
int ref64_close(void **state);

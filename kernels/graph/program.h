/* A graph made ready to run: a flat array of calls, every tensor at its place in one arena or in what is bound.
 * Running one allocates nothing and decides nothing. */
#pragma once
#include "kernels/graph/graph.h"
#include <stdio.h>

typedef struct lg_program lg_program;

/* Places the graph's values and sizes its scratch memory, by a dry stream of the graph's device (on which a
 * backend may choose its algorithms now). The graph may be freed afterwards. */
int lg_graph_compile(const lg_graph *g, lg_program **ret);
void lg_program_free(lg_program **p);
/* What a run needs beside what is bound, in device memory that the caller keeps. */
size_t lg_program_arena_bytes(const lg_program *p);
size_t lg_program_scratch_bytes(const lg_program *p);
/* And in host memory, best pinned, for what is offloaded (offload.h); 0: nothing is. */
size_t lg_program_host_bytes(const lg_program *p);
/* How much of what was lent (lg_graph_lend) is in use at once, at most. */
size_t lg_program_lent_bytes(const lg_program *p);
/* Streams and events for the copies, before the first run; the program's. */
int lg_program_open_lanes(lg_program *p, lg_device *d);

struct lg_program_memory {
    void *arena; /* 64-byte aligned, of lg_program_arena_bytes */
    void *scratch;
    void *host;      /* of lg_program_host_bytes */
    void *exchanged; /* of lg_program_exchanged_bytes (exchange.h) */
    void *lent;      /* 64-byte aligned: of lg_graph_lend; NULL: nothing is */
    void *const
        *bound; /* by the numbers of lg_graph_bind; those that the part does not use may be NULL */
    bool add;   /* results are added to what lies in the bound sums, else overwrite it */
};
/* Where a bound input has a place of the program's in one of its parts (lg_graph_place_input), which uses it there. */
void *lg_program_input_at(const lg_program *p, const struct lg_program_memory *m, int bound,
                          bool backward);
/* The backward of a graph is what was recorded from lg_graph_grad on; it may run once its forward has, with the same
 * arena, which nobody may have touched in between. */
enum lg_program_part { LG_PROGRAM_FORWARD = 1, LG_PROGRAM_BACKWARD = 2, LG_PROGRAM_ALL = 3 };
/* Enqueues the part's calls on s, whose scratch memory this sets. Not for two threads at once: the calls are kept
 * in the program and pointed at the memory of this run. */
void lg_program_run(lg_program *p, lg_stream *s, const struct lg_program_memory *m,
                    enum lg_program_part part);
/* The same in stretches, between which bound memory may come and go; what is bound need only be there while a node
 * uses it. Nodes are numbered from 0, the forward's before the backward's. */
int lg_program_nodes(const lg_program *p, enum lg_program_part part);
void lg_program_run_nodes(lg_program *p, lg_stream *s, const struct lg_program_memory *m, int from,
                          int to);
/* Nodes [first, end). */
struct lg_node_range {
    int first, end;
};
/* Those of a part from the first to the last that uses a bound value; empty when none does. */
struct lg_node_range lg_program_uses(const lg_program *p, int bound, enum lg_program_part part);

/* Floating-point operations of the products in one run: linears, attention, convolutions; a multiply-add
 * counts two. */
double lg_program_flops(const lg_program *p);
/* As text, for people and golden tests: values with type, shape, bytes, place, first and last use; nodes in
 * order with their block and whether they belong to the backward; the arena and which node needs most of it. */
void lg_program_print(const lg_program *p, FILE *to);

/* Fusing: pairs of nodes become one operation that computes the same with less traffic, on every backend and
 * whatever else is done to the graph, so that bits depend on neither.
 *
 *   gate_residual_forward, norm_modulate_forward of its result    -> residual_norm_forward
 *   norm_modulate_backward, gate_residual_backward of its dx      -> norm_residual_backward
 *   linear_backward_data, act_backward of its dx                  -> linear_backward_data with act
 *   conv3d_forward, rms_act_forward of its result, unmodulated    -> conv3d_forward with normed, without y if none else reads it
 *   linear_backward_weight's dbias                                -> what made its dy, where that can sum it
 *
 * Called once, when the graph is complete and before what repeats nodes (recompute.h): a fused node may join two
 * blocks; it belongs to the one whose norm it holds. */
#pragma once
#include "kernels/graph/graph.h"

void lg_graph_fuse(lg_graph *g);

//! The attention phase: one tile for each KV head of each attention item.

use super::forward::Step;
use super::kernels::attend::AttendCall;
use super::plan::{AttentionItem, Row};
use super::pool::Pool;

/// Computes attention for all rows of the step in one layer.
pub(crate) fn run(step: &Step<'_>, pool: &mut Pool, layer: usize) {
    let (items, kv_heads) = (&step.plan.items, step.config.kv_head_count);
    let tiles = items.len() * kv_heads;
    pool.parallel(tiles, &|tile, thread| {
        // From the back: the rows with the longest past come first, so that the last tiles are short.
        let tile = tiles - 1 - tile;
        run_tile(step, (items[tile / kv_heads], thread), (layer, tile % kv_heads));
    });
}

fn run_tile(step: &Step<'_>, (item, thread): (AttentionItem, usize), (layer, kv_head): (usize, usize)) {
    let config = step.config;
    let (head_dim, group) = (config.head_dim, config.head_count / config.kv_head_count);
    let first_row = item.first_row as usize;
    let Row { position, sequence, .. } = step.plan.rows[first_row];
    if item.alone {
        // SAFETY: the only row of its sequence, and only this tile handles this head of it.
        unsafe { step.turn_and_store(first_row, layer, kv_head) };
    }
    let column = kv_head * group * head_dim;
    let call = AttendCall {
        queries: step.scratch.qkv.pointer(first_row * step.qkv_columns() + column),
        query_stride: step.qkv_columns(),
        out: step.scratch.attention.pointer(first_row * config.query_size() + column),
        out_stride: config.query_size(),
        rows: item.rows as usize,
        group,
        head_dim,
        first_position: position as usize,
        scale: config.attention_scale,
        softcap: config.attention_softcap,
        window: config.window_of(layer),
        keys_of: &|tile| step.keys_of(sequence as usize, tile, (layer, kv_head)),
        values_offset: step.values_offset(),
        dtype: step.geometry.dtype,
    };
    // SAFETY: the scratch is this thread's own. Queries and KV of chunks were stored in an earlier phase, those of a
    // lone row just now by this tile; nobody writes them in this phase. `out` belongs to this tile alone.
    unsafe { (step.kernels.attend)(&call, &mut step.scratch.threads[thread].attention.get(head_dim)) };
}

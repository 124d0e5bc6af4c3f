//! The attention phase: one tile for each KV head of each task.

use std::sync::atomic::Ordering;

use super::forward::Step;
use super::kernels::attend::{AttendCall, PARTITION, PartialSums};
use super::plan::{AttentionItem, AttentionTask, PartitionTask, Row};
use super::pool::Pool;

/// Layers with windows of up to so many tokens are not split: they read too little.
const SMALL_WINDOW: usize = 2 * PARTITION;

/// Computes attention for all rows of the step in one layer.
pub(crate) fn run(step: &Step<'_>, pool: &mut Pool, layer: usize) {
    let kv_heads = step.config.kv_head_count;
    // From the back: the rows with the longest past come first, so that the last tiles are short.
    if step
        .config
        .window_of(layer)
        .is_some_and(|window| window <= SMALL_WINDOW)
    {
        let items = step.plan.items.len();
        return pool.parallel(items * kv_heads, &|tile, thread| {
            let item = items - 1 - tile / kv_heads;
            run_item(step, (item, thread), (layer, tile % kv_heads));
        });
    }
    let tasks = &step.plan.tasks;
    for task in tasks {
        // Each phase counts from zero. The one before left its count, also if it panicked.
        if let AttentionTask::Partition(PartitionTask {
            first_slot,
            partition: 0,
            ..
        }) = task
        {
            let first = *first_slot as usize * kv_heads;
            for done in &step.scratch.partitions.done[first..first + kv_heads] {
                done.store(0, Ordering::Relaxed);
            }
        }
    }
    pool.parallel(tasks.len() * kv_heads, &|tile, thread| {
        let head = (layer, tile % kv_heads);
        match tasks[tasks.len() - 1 - tile / kv_heads] {
            AttentionTask::Item(item) => run_item(step, (item as usize, thread), head),
            AttentionTask::Partition(task) => run_partition(step, (task, thread), head),
        }
    });
}

fn run_item(step: &Step<'_>, (item, thread): (usize, usize), (layer, kv_head): (usize, usize)) {
    let item = step.plan.items[item];
    if item.stores {
        // SAFETY: the only row of its sequence, and only this tile handles this head of it.
        unsafe { step.turn_and_store(item.first_row as usize, layer, kv_head) };
    }
    with_call(step, item, (layer, kv_head), |call| {
        let scratch = &step.scratch.threads[thread].attention;
        let queries = call.rows * call.group;
        // SAFETY: the scratch is this thread's own. Queries and KV of chunks were stored in an earlier phase, those of a
        // lone row just now by this tile; nobody writes them in this phase.
        unsafe {
            let mut sums = scratch.sums.get(0, queries);
            let mut partitions = call.partitions();
            if let Some(first) = partitions.next() {
                (step.kernels.attend_partition)(call, first, &mut scratch.get(), &mut sums);
            }
            for partition in partitions {
                let mut later = scratch.partition.get(0, queries);
                (step.kernels.attend_partition)(call, partition, &mut scratch.get(), &mut later);
                (step.kernels.add_partition)(&mut sums, &later);
            }
            write(step, call, (item, kv_head), &sums);
        }
    });
}

/// Computes a partition of an item. The tile that is the last one to be done adds all of them up.
fn run_partition(step: &Step<'_>, (task, thread): (PartitionTask, usize), (layer, kv_head): (usize, usize)) {
    let item = step.plan.items[task.item as usize];
    let partitions = &step.scratch.partitions;
    let slot = |partition: u32| (task.first_slot + partition) as usize * step.config.kv_head_count + kv_head;
    with_call(step, item, (layer, kv_head), |call| {
        let queries = call.rows * call.group;
        // SAFETY: scratch and slot are this tile's own, until it says that it is done. Queries and KV were stored in an earlier phase.
        unsafe {
            let mut sums = partitions.slots.get(slot(task.partition), queries);
            let scratch = &mut step.scratch.threads[thread].attention.get();
            (step.kernels.attend_partition)(call, task.partition as usize, scratch, &mut sums);
        }
        if partitions.done[slot(0)].fetch_add(1, Ordering::AcqRel) + 1 < task.partitions {
            return;
        }
        // SAFETY: all tiles of this item and head are done, and their writes are visible: the counter orders them.
        unsafe {
            let mut sums = partitions.slots.get(slot(0), queries);
            for later in 1..task.partitions {
                (step.kernels.add_partition)(&mut sums, &partitions.slots.get(slot(later), queries));
            }
            write(step, call, (item, kv_head), &sums);
        }
    });
}

fn with_call(
    step: &Step<'_>,
    item: AttentionItem,
    (layer, kv_head): (usize, usize),
    run: impl FnOnce(&AttendCall<'_>),
) {
    let config = step.config;
    let (head_dim, group) = (config.head_dim, config.head_count / config.kv_head_count);
    let first_row = item.first_row as usize;
    let Row { position, sequence, .. } = step.plan.rows[first_row];
    run(&AttendCall {
        queries: step
            .scratch
            .qkv
            .pointer(first_row * step.qkv_columns() + kv_head * group * head_dim),
        query_stride: step.qkv_columns(),
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
    });
}

/// Writes the quotients of values and weights.
///
/// # Safety
/// Nobody else uses the results of these rows and of this head.
unsafe fn write(
    step: &Step<'_>,
    call: &AttendCall<'_>,
    (item, kv_head): (AttentionItem, usize),
    sums: &PartialSums<'_>,
) {
    let width = call.group * call.head_dim;
    for row in 0..call.rows {
        let start = (item.first_row as usize + row) * step.config.query_size() + kv_head * width;
        // SAFETY: the caller's promise.
        let out = unsafe { step.scratch.attention.write(start..start + width) };
        let heads = out.chunks_exact_mut(call.head_dim).zip(row * call.group..);
        for (out, query) in heads {
            let factor = 1.0 / sums.totals[query];
            for (out, sum) in out.iter_mut().zip(&sums.sums[query * call.head_dim..]) {
                *out = sum * factor;
            }
        }
    }
}

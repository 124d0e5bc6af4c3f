//! How much slower an engine is beside others of the same machine: they share memory, caches and heat.

use std::sync::atomic::{AtomicBool, Ordering};

use super::rig::Rig;
use super::sweep::median;
use super::{Opening, pin};

/// Rounds of each measurement.
const ROUNDS: usize = 7;
const CHUNK: u32 = 256;
const BATCH: u32 = 4;

/// How many times as long a step takes while 1, 2... nodes of the machine compute: [1, ...].
pub(super) fn slowdown(
    rig: &mut Rig,
    (opening, cores): (&Opening<'_>, &[u32]),
    neighbours: u32,
) -> anyhow::Result<Vec<f64>> {
    let mut slowdown = vec![1.0];
    if neighbours == 0 {
        return Ok(slowdown);
    }
    let alone = typical(rig)?;
    for count in 1..=neighbours {
        let beside = beside(count, (opening, cores), || typical(rig))?;
        let ratios = beside.iter().zip(&alone).map(|(beside, alone)| beside / alone);
        // More neighbours never help; a figure below 1 is noise.
        slowdown.push(median(ratios.collect()).max(1.0));
    }
    Ok(slowdown)
}

/// Medians of a chunk's and of a batch's steps.
fn typical(rig: &mut Rig) -> anyhow::Result<[f64; 2]> {
    let (mut chunks, mut batches) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        round(rig, &mut |is_chunk, seconds| match is_chunk {
            true => chunks.push(seconds),
            false => batches.push(seconds),
        })?;
    }
    Ok([median(chunks), median(batches)])
}

/// Prompts, then steps of decoding: what nodes do.
fn round(rig: &mut Rig, tell: &mut dyn FnMut(bool, f64)) -> anyhow::Result<()> {
    let mut load = rig.load(CHUNK);
    for _ in 0..BATCH {
        load.add(CHUNK, 8)?;
    }
    while let Some(timed) = load.step()? {
        match (timed.shape.prefill_tokens, timed.shape.decode_rows) {
            (0, rows) if rows == u64::from(BATCH) => tell(false, timed.seconds),
            (tokens, 0) if tokens == u64::from(CHUNK) => tell(true, timed.seconds),
            _ => {}
        }
    }
    Ok(())
}

/// Runs `measure` while so many other engines compute without a pause.
fn beside<T>(
    count: u32,
    (opening, cores): (&Opening<'_>, &[u32]),
    measure: impl FnOnce() -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let is_over = AtomicBool::new(false);
    let (ready, all_ready) = std::sync::mpsc::sync_channel(count as usize);
    std::thread::scope(|scope| {
        let neighbours: Vec<_> = (1..=count)
            .map(|number| {
                let (ready, is_over) = (ready.clone(), &is_over);
                scope.spawn(move || -> anyhow::Result<()> {
                    pin(cores, number, opening.args.threads)?;
                    let (mut rig, _) = opening.open()?;
                    round(&mut rig, &mut |_, _| ())?;
                    let _ = ready.send(());
                    // Else a neighbour that fails would be waited for as long as this one computes.
                    drop(ready);
                    while !is_over.load(Ordering::Relaxed) {
                        round(&mut rig, &mut |_, _| ())?;
                    }
                    Ok(())
                })
            })
            .collect();
        drop(ready);
        // A neighbour that failed sends nothing, and its error is told below.
        let are_ready = (0..count).all(|_| all_ready.recv().is_ok());
        let measured = are_ready.then(measure);
        is_over.store(true, Ordering::Relaxed);
        for neighbour in neighbours {
            neighbour
                .join()
                .map_err(|_| anyhow::anyhow!("a neighbour's thread has panicked"))??;
        }
        measured.ok_or_else(|| anyhow::anyhow!("a neighbour did not start"))?
    })
}

//! How much slower an engine is beside others of the same machine: they share memory, caches and heat.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use anyhow::Context;
use simulator::costs::{ByKind, StepKind};

use super::rig::Rig;
use super::sweep::median;
use super::{Opening, pin};

/// How often all engines are opened anew. Where the weights lie in memory decides how well they get on in a cache: of eight openings
/// seven showed 1.24 to 1.29, and one 1.02 (docs/measurements/simulator.md).
const OPENINGS: usize = 8;
/// Pairs of a stretch alone and a stretch beside others, for each kind of own and of other steps. The speed of a shared machine
/// changes within seconds, so a stretch takes a part of one.
const PAIRS: usize = 3;
/// Prompt tokens of a computing step.
const CHUNK: u32 = 256;
/// Of a sequence that decodes. The first steps after a prompt are left out: their weights are not in the caches yet.
const READING_PROMPT: u32 = 16;
const READING_STEPS: u32 = 64;
const COLD_STEPS: usize = 16;

type Slowdown = ByKind<ByKind<f64>>;

/// How many times as long steps take while 1, 2... other nodes of the machine compute: the mean of some openings.
pub(super) fn slowdown(opening: &Opening<'_>) -> anyhow::Result<Vec<Slowdown>> {
    if opening.args.neighbours == 0 {
        return Ok(Vec::new());
    }
    let found = (0..OPENINGS)
        .map(|_| of_one_opening(opening))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let mean = |others: usize, own, kind| {
        let times = found.iter().map(|opening| opening[others].of(own).of(kind));
        // More neighbours never help; a figure below 1 is noise.
        (times.sum::<f64>() / OPENINGS as f64).max(1.0)
    };
    let of_count = |others| ByKind::of_each(|own| ByKind::of_each(|kind| mean(others, own, kind)));
    Ok((0..opening.args.neighbours as usize).map(of_count).collect())
}

fn of_one_opening(opening: &Opening<'_>) -> anyhow::Result<Vec<Slowdown>> {
    let opening = &opening.afresh();
    let (mut rig, _) = opening.open()?;
    let is_wanted = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let mut neighbours = Vec::new();
        let mut threads = Vec::new();
        for number in 1..=opening.args.neighbours {
            // Rendezvous: each side waits for the other.
            let (ask, asked) = sync_channel(0);
            let (tell, told) = sync_channel(0);
            let is_wanted = &is_wanted;
            threads.push(scope.spawn(move || serve(number, opening, is_wanted, (&asked, &tell))));
            neighbours.push(Neighbour { ask, told });
        }
        let measured = (1..=neighbours.len())
            .map(|count| beside(&mut rig, &neighbours[..count], &is_wanted))
            .collect();
        // Without anybody who asks they end. The error of one that failed says more than that it was lost.
        drop(neighbours);
        for thread in threads {
            thread
                .join()
                .map_err(|_| anyhow::anyhow!("a neighbour's thread has panicked"))??;
        }
        measured
    })
}

/// While this lives the neighbours run steps. It also ends with an error and with a panic of the thread that measures: a scope waits for its
/// threads, so neighbours that went on would keep the panic from ending the process.
struct StepsAreWanted<'a>(&'a AtomicBool);

impl<'a> StepsAreWanted<'a> {
    fn begin(is_wanted: &'a AtomicBool) -> Self {
        is_wanted.store(true, Ordering::Relaxed);
        Self(is_wanted)
    }
}

impl Drop for StepsAreWanted<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

/// Another engine, on a thread and cores of its own.
struct Neighbour {
    /// The kind of steps that it runs from now on, for as long as any is wanted.
    ask: SyncSender<StepKind>,
    /// Once when it runs such steps, and once when it has stopped.
    told: Receiver<()>,
}

fn serve(
    number: u32,
    opening: &Opening<'_>,
    is_wanted: &AtomicBool,
    (asked, tell): (&Receiver<StepKind>, &SyncSender<()>),
) -> anyhow::Result<()> {
    pin(&opening.args.cores, number, opening.args.threads)?;
    let (mut rig, _) = match opening.args.own_weights {
        true => opening.afresh().open()?,
        false => opening.open()?,
    };
    while let Ok(kind) = asked.recv() {
        let mut has_told = false;
        while is_wanted.load(Ordering::Relaxed) {
            stretch(&mut rig, kind, &mut |_| {
                if !std::mem::replace(&mut has_told, true) {
                    // A lost receiver: the measurement is over, and nothing is wanted soon.
                    let _ = tell.send(());
                }
                is_wanted.load(Ordering::Relaxed)
            })?;
        }
        let _ = tell.send(());
    }
    Ok(())
}

fn beside(rig: &mut Rig, others: &[Neighbour], is_wanted: &AtomicBool) -> anyhow::Result<Slowdown> {
    let mut slowdown = Slowdown::default();
    for own in StepKind::ALL {
        for kind in StepKind::ALL {
            let mut ratios = Vec::with_capacity(PAIRS);
            for _ in 0..PAIRS {
                let alone = typical(rig, own)?;
                let steps_are_wanted = StepsAreWanted::begin(is_wanted);
                for other in others {
                    other.ask.send(kind).context("a neighbour was lost")?;
                }
                wait_for(others)?;
                let beside = typical(rig, own)?;
                drop(steps_are_wanted);
                wait_for(others)?;
                ratios.push(beside / alone);
            }
            *slowdown.of_mut(own).of_mut(kind) = median(ratios);
        }
    }
    Ok(slowdown)
}

fn wait_for(others: &[Neighbour]) -> anyhow::Result<()> {
    for other in others {
        other.told.recv().context("a neighbour was lost")?;
    }
    Ok(())
}

/// The median of a stretch of such steps.
fn typical(rig: &mut Rig, kind: StepKind) -> anyhow::Result<f64> {
    let mut found = Vec::new();
    stretch(rig, kind, &mut |seconds| {
        found.push(seconds);
        true
    })?;
    Ok(median(found))
}

/// Some steps of one kind, until `tell` returns false. It is told the seconds of each.
fn stretch(rig: &mut Rig, kind: StepKind, tell: &mut dyn FnMut(f64) -> bool) -> anyhow::Result<()> {
    let mut load = rig.load(CHUNK);
    match kind {
        StepKind::Computing => load.add(CHUNK, 1)?,
        StepKind::Reading => load.add(READING_PROMPT, READING_STEPS)?,
    }
    let mut reading_steps = 0;
    while let Some(timed) = load.step()? {
        let is_of_kind = match kind {
            StepKind::Computing => timed.shape.prefill_tokens > 0,
            StepKind::Reading if timed.shape.decode_rows > 0 => {
                reading_steps += 1;
                reading_steps > COLD_STEPS
            }
            StepKind::Reading => false,
        };
        if is_of_kind && !tell(timed.seconds) {
            break;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measure(is_wanted: &AtomicBool) {
        let _steps = StepsAreWanted::begin(is_wanted);
        assert!(!is_wanted.load(Ordering::Relaxed), "a step that panics");
    }

    #[test]
    fn no_step_is_wanted_after_a_panic_of_the_measurement() {
        let is_wanted = AtomicBool::new(false);
        let outcome = std::panic::catch_unwind(|| measure(&is_wanted));
        assert!(outcome.is_err());
        assert!(!is_wanted.load(Ordering::Relaxed));
    }
}

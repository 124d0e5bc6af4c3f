//! Which steps are measured: chunks of a prompt at growing contexts, batches that decode, and both in one step.

use std::collections::BTreeMap;

use simulator::costs::{BATCHES, StepShape};

use super::rig::{Rig, Timed};

pub(super) const CHUNK_MAX: u32 = 2_048;
/// Steps of one batch; the first one is left out.
const DECODE_STEPS: u32 = 8;

#[derive(Debug)]
pub(super) struct Sweep {
    /// Tokens of a chunk, and of the prompt that is cut into such chunks.
    chunks: &'static [(u32, u32)],
    /// Contexts at which the numbers of sequences of `BATCHES` decode.
    contexts: &'static [u32],
    /// Decoding sequences beside a chunk of so many tokens.
    mixed: &'static [(u32, u32)],
    repeats: u32,
}

const CHUNKS: &[(u32, u32)] = &[
    (16, 256),
    (32, 256),
    (64, 512),
    (96, 384),
    (128, 1_024),
    (192, 768),
    (256, 2_048),
    (384, 1_536),
    (512, 2_048),
    (1_024, 2_048),
    (2_048, 2_048),
];
const QUICK_CHUNKS: &[(u32, u32)] = &[(16, 64), (64, 256), (256, 512), (512, 1_024)];
const CONTEXTS: &[u32] = &[64, 384, 1_024];
const QUICK_CONTEXTS: &[u32] = &[64, 384];
const MIXED: &[(u32, u32)] = &[(4, 128), (8, 480)];

/// The measured times of each kind of step.
#[derive(Debug, Default)]
pub(super) struct Samples {
    kinds: BTreeMap<StepShape, Vec<f64>>,
    /// Of the steps of each batch: how far they are from their median, as a share of it.
    deviations: Vec<f64>,
}

impl Sweep {
    pub fn new(is_quick: bool, repeats: u32) -> Self {
        match is_quick {
            true => Self {
                chunks: QUICK_CHUNKS,
                contexts: QUICK_CONTEXTS,
                mixed: &MIXED[..1],
                repeats: 1,
            },
            false => Self {
                chunks: CHUNKS,
                contexts: CONTEXTS,
                mixed: MIXED,
                repeats,
            },
        }
    }

    pub fn repeats(&self) -> u32 {
        self.repeats
    }

    pub fn kinds(&self) -> u32 {
        let chunks: u32 = self.chunks.iter().map(|(chunk, prompt)| prompt.div_ceil(*chunk)).sum();
        let batches = (self.contexts.len() * BATCHES.len()) as u32;
        chunks + batches + self.mixed.len() as u32
    }

    pub fn measure(&self, rig: &mut Rig) -> anyhow::Result<Samples> {
        let mut samples = Samples::default();
        // Warm: memory is touched, the clock of the core is up.
        prompt(rig, (256, 512), &mut Samples::default())?;
        for _ in 0..self.repeats {
            for (chunk, tokens) in self.chunks {
                if rig.has_room(1, tokens + 2) {
                    prompt(rig, (*chunk, *tokens), &mut samples)?;
                }
            }
            for context in self.contexts {
                decode(rig, *context, &mut samples)?;
            }
            for (batch, chunk) in self.mixed {
                mixed(rig, (*batch, *chunk), &mut samples)?;
            }
        }
        Ok(samples)
    }
}

/// One prompt, chunk by chunk.
fn prompt(rig: &mut Rig, (chunk, tokens): (u32, u32), samples: &mut Samples) -> anyhow::Result<()> {
    let mut load = rig.load(chunk);
    load.add(tokens, 1)?;
    while let Some(timed) = load.step()? {
        samples.add(timed.shape, timed.seconds);
    }
    Ok(())
}

/// As many sequences decode as the largest number of `BATCHES`; then some of them end, so that the next smaller number is left, and so on.
fn decode(rig: &mut Rig, context: u32, samples: &mut Samples) -> anyhow::Result<()> {
    let longest = context + BATCHES.len() as u32 * DECODE_STEPS + 1;
    let mut batches = BATCHES.map(|batch| batch as u32).into_iter().rev();
    let Some(batch) = batches.find(|batch| rig.has_room(*batch, longest)) else {
        return Ok(());
    };
    let mut load = rig.load(CHUNK_MAX);
    // Prompts of one step after the other are computed first; who was early decodes meanwhile.
    let computed_at = |number: u32| ((number + 1) * context).div_ceil(CHUNK_MAX);
    for number in 0..batch {
        let rounds = rounds_of(number, batch);
        let early = computed_at(batch - 1) - computed_at(number);
        load.add(context, rounds * DECODE_STEPS + 1 + early)?;
    }
    let mut steps: BTreeMap<u64, Vec<Timed>> = BTreeMap::new();
    while let Some(timed) = load.step()? {
        if timed.shape.prefill_tokens == 0 && BATCHES.contains(&timed.shape.decode_rows) {
            steps.entry(timed.shape.decode_rows).or_default().push(timed);
        }
    }
    for steps in steps.into_values() {
        samples.add_batch(steps.get(1..).unwrap_or_default());
    }
    Ok(())
}

/// For how many rounds a sequence of a batch decodes, one for each number of sequences in which it still has a place. The first one is
/// alone in the end.
fn rounds_of(number: u32, batch: u32) -> u32 {
    let sizes = BATCHES
        .into_iter()
        .filter(|size| (u64::from(number) + 1..=u64::from(batch)).contains(size));
    sizes.count() as u32
}

/// Sequences that decode while a prompt is computed in chunks beside them.
fn mixed(rig: &mut Rig, (batch, chunk): (u32, u32), samples: &mut Samples) -> anyhow::Result<()> {
    if !rig.has_room(batch + 1, 1_024) {
        return Ok(());
    }
    let mut load = rig.load(batch + chunk);
    for _ in 0..batch {
        load.add(64, 64)?;
    }
    let mut is_added = false;
    while let Some(timed) = load.step()? {
        let shape = timed.shape;
        if shape.decode_rows == u64::from(batch) && shape.prefill_tokens == 0 && !is_added {
            load.add(chunk * 2, 1)?;
            is_added = true;
        }
        if shape.decode_rows == u64::from(batch) && shape.prefill_tokens > 0 {
            samples.add(shape, timed.seconds);
        }
    }
    Ok(())
}

impl Samples {
    fn add(&mut self, shape: StepShape, seconds: f64) {
        self.kinds.entry(shape).or_default().push(seconds);
    }

    /// Steps of one batch, whose contexts grow by a token each: the step in the middle stands for all of them.
    fn add_batch(&mut self, steps: &[Timed]) {
        let Some(middle) = steps.get(steps.len() / 2) else {
            return;
        };
        let typical = median(steps.iter().map(|step| step.seconds).collect());
        self.deviations
            .extend(steps.iter().map(|step| (step.seconds / typical - 1.0).abs()));
        self.add(middle.shape, typical);
    }

    pub fn medians(&self) -> Vec<(StepShape, f64)> {
        let of = |(shape, seconds): (&StepShape, &Vec<f64>)| (*shape, median(seconds.clone()));
        self.kinds.iter().map(of).collect()
    }

    /// Coefficient of variation of a step, from the median of the deviations: 1.4826 times it, as for a normal distribution. Single
    /// long steps, which are the machine's and not the engine's, do not count.
    pub fn variation(&self) -> f64 {
        1.482_6 * median(self.deviations.clone())
    }
}

pub(super) fn median(values: Vec<f64>) -> f64 {
    workload::statistics::Samples::new(values)
        .percentile(50.0)
        .unwrap_or(0.0)
}

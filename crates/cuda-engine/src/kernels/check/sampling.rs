//! Checks of the draw of tokens: the same token as the host's sampler, every time.

use engine::{SampleError, SampleInput, Sampler};
use serving_core::ids::{ChoiceIndex, OutputIndex, TokenId};
use serving_core::request::{SamplingParams, StopConditions};

use super::Run;
use super::data::{f32_bytes, u32_bytes};
use crate::kernels::calls::{Adjustment, DRAWN_BYTES, Draw, DrawTokens, Drawn, EDIT_BYTES, Edit, PrepareLogits};
use crate::kernels::compile::KernelError;
use crate::kernels::shapes::VOCABULARIES;
use crate::kernels::table::KernelId;

/// Draws from each row, of different choices.
const CHOICES: u32 = 3;

/// Everything about one row of logits but the logits.
struct Case {
    params: SamplingParams,
    stop: StopConditions,
    prompt: Vec<TokenId>,
    outputs: Vec<TokenId>,
    logits: Logits,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Logits {
    Ordinary,
    /// Many equal ones, both zeros among them.
    Ties,
    /// From -200 to 200.
    Large,
    /// One is not a number.
    Broken,
    AllMasked,
}

pub(super) fn check(run: &mut Run<'_, '_>) -> Result<(), KernelError> {
    for vocab in run.shapes(&VOCABULARIES) {
        let cases = cases(vocab);
        let rows: Vec<Vec<f32>> = cases.iter().map(|case| logits(run, case.logits, vocab)).collect();
        draw(run, &cases, &rows)?;
    }
    Ok(())
}

fn case(logits: Logits, change: impl FnOnce(&mut SamplingParams)) -> Case {
    let mut params = SamplingParams {
        temperature: 0.8,
        ..SamplingParams::greedy()
    };
    change(&mut params);
    Case {
        params,
        stop: StopConditions {
            max_tokens: 100,
            min_tokens: 0,
            end_tokens: Vec::new(),
            stop_token_ids: Vec::new(),
        },
        prompt: Vec::new(),
        outputs: Vec::new(),
        logits,
    }
}

fn cases(vocab: u32) -> Vec<Case> {
    let mut list = Vec::new();
    for logits in [Logits::Ordinary, Logits::Ties, Logits::Large] {
        list.push(case(logits, |params| params.temperature = 0.0));
        list.push(case(logits, |_| {}));
        list.push(case(logits, |params| params.min_p = 0.2));
        list.push(case(logits, |params| params.top_p = 0.7));
        list.push(case(logits, |params| (params.min_p, params.top_p) = (0.3, 0.8)));
        list.push(case(logits, |params| params.top_k = Some(5)));
        list.push(case(logits, |params| {
            (params.top_k, params.top_p, params.min_p) = (Some(40), 0.5, 0.1)
        }));
    }
    // Ends of ranges: nothing but the best, everything, a heat that makes all equal, and one that makes none.
    list.push(case(Logits::Ordinary, |params| params.top_p = 0.0));
    list.push(case(Logits::Ties, |params| params.top_k = Some(0)));
    list.push(case(Logits::Ties, |params| params.top_k = Some(vocab)));
    list.push(case(Logits::Ties, |params| params.min_p = 1.0));
    list.push(case(Logits::Large, |params| params.temperature = 1e30));
    list.push(case(Logits::Large, |params| params.temperature = 1e-30));
    let mut adjusted = case(Logits::Ordinary, |params| {
        params.repetition_penalty = 1.3;
        (params.frequency_penalty, params.presence_penalty) = (0.5, 0.25);
        params.logit_bias = vec![(TokenId(3), 7.5), (TokenId(8), -100.0)];
    });
    adjusted.prompt = [3, 4, 5, 3].map(TokenId).to_vec();
    // One is not in the vocabulary.
    adjusted.outputs = [5, 9, 9, vocab].map(TokenId).to_vec();
    adjusted.stop.min_tokens = 50;
    adjusted.stop.end_tokens = vec![TokenId(0)];
    list.push(adjusted);
    list.push(case(Logits::Broken, |_| {}));
    list.push(case(Logits::AllMasked, |_| {}));
    list
}

fn logits(run: &mut Run<'_, '_>, kind: Logits, vocab: u32) -> Vec<f32> {
    let mut row = run.random.normals(vocab as usize);
    match kind {
        Logits::Ordinary => row.iter_mut().for_each(|logit| *logit *= 3.0),
        // Rounding a small negative number gives the negative zero.
        Logits::Ties => row.iter_mut().for_each(|logit| *logit = logit.round()),
        Logits::Large => row
            .iter_mut()
            .for_each(|logit| *logit = (*logit * 80.0).clamp(-200.0, 200.0)),
        Logits::Broken => (row[7], row[20]) = (f32::NAN, f32::INFINITY),
        Logits::AllMasked => row.fill(f32::NEG_INFINITY),
    }
    row
}

fn input(case: &Case, choice: u32) -> SampleInput<'_> {
    SampleInput {
        params: &case.params,
        stop: &case.stop,
        seed: 42,
        choice: ChoiceIndex(choice),
        output_index: OutputIndex(case.outputs.len() as u32),
        prompt: &case.prompt,
        outputs: &case.outputs,
        logprobs: None,
        allowed: None,
    }
}

/// What the host draws.
fn want(case: &Case, row: &[f32], choice: u32) -> Option<Drawn> {
    let mut sampler = Sampler::new(row.len() as u32).ok()?;
    match sampler.sample(&input(case, choice), &mut row.to_vec()) {
        Ok(sampled) => Some(Drawn::Token(sampled.token)),
        Err(SampleError::NotFinite { token }) => Some(Drawn::NotFinite(TokenId(token))),
        Err(SampleError::NothingLeft) => Some(Drawn::NothingLeft),
        Err(_) => None,
    }
}

fn draw(run: &mut Run<'_, '_>, cases: &[Case], rows: &[Vec<f32>]) -> Result<(), KernelError> {
    let vocab = rows.first().map_or(0, Vec::len) as u32;
    let (mut adjustments, mut edits, mut draws) = (Vec::new(), Vec::new(), Vec::new());
    let mut wanted = Vec::new();
    for (index, (case, row)) in cases.iter().zip(rows).enumerate() {
        // All choices of a row have the same edits.
        let list = Edit::list(&input(case, 0));
        adjustments.extend(
            Adjustment {
                first_edit: (edits.len() / EDIT_BYTES) as u32,
                edits: list.len() as u32,
                repetition_penalty: case.params.repetition_penalty,
                frequency_penalty: case.params.frequency_penalty,
                presence_penalty: case.params.presence_penalty,
            }
            .to_bytes(),
        );
        edits.extend(list.into_iter().flat_map(Edit::to_bytes));
        for choice in 0..CHOICES {
            draws.extend(Draw::of(&input(case, choice), index as u32).to_bytes());
            wanted.push(want(case, row, choice));
        }
    }
    let logits = run.upload(&f32_bytes(&rows.concat()))?;
    let (adjustments, edits) = (run.upload(&adjustments)?, run.upload(&edits)?);
    let status = run.upload(&u32_bytes(&vec![0; rows.len()]))?;
    let (draws, drawn) = (
        run.upload(&draws)?,
        run.upload(&vec![0xff; wanted.len() * DRAWN_BYTES])?,
    );
    let prepare = PrepareLogits {
        logits: logits.ptr(),
        adjustments: adjustments.ptr(),
        edits: edits.ptr(),
        status: status.ptr(),
        rows: rows.len() as u32,
        vocab,
    };
    let sample = DrawTokens {
        logits: logits.ptr(),
        status: status.ptr(),
        draws: draws.ptr(),
        drawn: drawn.ptr(),
        count: wanted.len() as u32,
        vocab,
    };
    let statuses = run.result(&prepare.call()?, &status)?;
    let expected: Vec<u32> = rows.iter().map(|row| first_unusable(row)).collect();
    let label = format!("{} rows of {vocab}", rows.len());
    run.same(
        (KernelId::PrepareLogits, label.clone()),
        &statuses,
        &u32_bytes(&expected),
    );
    let bytes = run.result(&sample.call()?, &drawn)?;
    let (records, _) = bytes.as_chunks::<DRAWN_BYTES>();
    let got: Vec<Option<Drawn>> = records.iter().map(|record| Drawn::from_bytes(*record)).collect();
    run.compare(
        (KernelId::DrawTokens, label),
        &got.iter().map(|drawn| code(*drawn)).collect::<Vec<f64>>(),
        &wanted.iter().map(|drawn| code(*drawn)).collect::<Vec<f64>>(),
        super::Limit::EXACT,
    );
    Ok(())
}

fn first_unusable(row: &[f32]) -> u32 {
    // No comparison holds for NaN.
    let is_usable = |logit: &f32| *logit < f32::INFINITY;
    row.iter()
        .position(|logit| !is_usable(logit))
        .map_or(u32::MAX, |token| token as u32)
}

/// A number for each thing that may become of a draw.
fn code(drawn: Option<Drawn>) -> f64 {
    match drawn {
        Some(Drawn::Token(token)) => f64::from(token.0),
        Some(Drawn::NotFinite(token)) => -1.0 - f64::from(token.0),
        Some(Drawn::NothingLeft) => 0.5,
        None => f64::NAN,
    }
}

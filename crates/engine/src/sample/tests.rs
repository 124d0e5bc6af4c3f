//! Rules, distributions and determinism of sampling.

use proptest::prelude::*;

use super::*;
use crate::{AllowedTokens, is_set};

struct Case {
    params: SamplingParams,
    stop: StopConditions,
    seed: u64,
    prompt: Vec<TokenId>,
    outputs: Vec<TokenId>,
    logprobs: Option<u32>,
    allowed: Option<Vec<u32>>,
}

fn case(change: impl FnOnce(&mut SamplingParams)) -> Case {
    let mut params = SamplingParams {
        temperature: 1.0,
        ..SamplingParams::greedy()
    };
    change(&mut params);
    Case {
        params,
        stop: StopConditions {
            max_tokens: 100,
            min_tokens: 0,
            end_tokens: vec![],
            stop_token_ids: vec![],
        },
        seed: 42,
        prompt: vec![],
        outputs: vec![],
        logprobs: None,
        allowed: None,
    }
}

impl Case {
    fn input(&self, index: u32) -> SampleInput<'_> {
        SampleInput {
            params: &self.params,
            stop: &self.stop,
            seed: self.seed,
            choice: ChoiceIndex(0),
            output_index: OutputIndex(index),
            prompt: &self.prompt,
            outputs: &self.outputs,
            logprobs: self.logprobs,
            allowed: self.allowed.as_deref().map(Allowed::Words),
        }
    }
    fn try_sample(&self, logits: &[f32], index: u32) -> Result<Sampled, SampleError> {
        Sampler::new(logits.len() as u32)
            .unwrap()
            .sample(&self.input(index), &mut logits.to_vec())
    }
    fn token(&self, logits: &[f32], index: u32) -> u32 {
        self.try_sample(logits, index).unwrap().token.0
    }
    fn counts(&self, logits: &[f32], draws: u32) -> Vec<u32> {
        let mut counts = vec![0; logits.len()];
        for index in 0..draws {
            counts[self.token(logits, index) as usize] += 1;
        }
        counts
    }
}

/// Asserts that `counts` fit `probabilities`; the bound is far above the 99.99 % point for these degrees of freedom.
fn assert_fits(counts: &[u32], probabilities: &[f64]) {
    let draws: u32 = counts.iter().sum();
    let mut chi_square = 0.0;
    for (count, probability) in counts.iter().zip(probabilities) {
        let expected = probability * f64::from(draws);
        if expected == 0.0 {
            assert_eq!(*count, 0, "a token of probability 0 was drawn");
        } else {
            chi_square += (f64::from(*count) - expected).powi(2) / expected;
        }
    }
    let freedom = probabilities.iter().filter(|p| **p > 0.0).count() as f64 - 1.0;
    let bound = freedom + 5.0 * (2.0 * freedom).sqrt() + 5.0;
    assert!(
        chi_square < bound,
        "chi-square {chi_square} with {freedom} degrees of freedom"
    );
}

fn softmax(logits: &[f32], temperature: f64) -> Vec<f64> {
    let best = logits.iter().fold(f64::NEG_INFINITY, |best, l| best.max(f64::from(*l)));
    let weights: Vec<f64> = logits
        .iter()
        .map(|l| ((f64::from(*l) - best) / temperature).exp())
        .collect();
    let sum: f64 = weights.iter().sum();
    weights.iter().map(|w| w / sum).collect()
}

const LOGITS: [f32; 8] = [0.3, 2.0, -1.0, 1.5, 2.0, -3.0, 0.0, 1.0];

#[test]
fn only_allowed_tokens_are_drawn_and_log_probabilities_are_those_of_all() {
    let logits: Vec<f32> = (0..40).map(|token| token as f32).collect();
    let mut case = case(|params| params.temperature = 0.0);
    case.logprobs = Some(1);
    // Tokens 3 and 33 of the first two words; a token beyond the words may not be drawn.
    case.allowed = Some(vec![1 << 3, 1 << 1]);
    let sampled = case.try_sample(&logits, 0).unwrap();
    assert_eq!(sampled.token, TokenId(33));
    let logprobs = sampled.logprobs.unwrap();
    assert_eq!(logprobs.top[0].0, TokenId(39));
    case.allowed = Some(vec![1 << 3]);
    assert_eq!(case.token(&logits, 0), 3);
    case.params.temperature = 30.0;
    case.allowed = Some(vec![1 << 3, 1 << 1]);
    let counts = case.counts(&logits, 200);
    assert_eq!(counts.iter().sum::<u32>(), counts[3] + counts[33]);
    assert!(
        counts[3] > 0 && counts[33] > counts[3],
        "{} and {}",
        counts[3],
        counts[33]
    );
    case.allowed = Some(Vec::new());
    assert_eq!(case.try_sample(&logits, 0), Err(SampleError::NothingLeft));
}

/// Knows the tokens of one row, and tells them one by one only where `tells` says so.
#[derive(Debug)]
struct Reluctant {
    words: Vec<u32>,
    tells: Vec<u32>,
    /// It says no to everything, as a grammar that has used up what it may cost does.
    is_tired: bool,
}

impl AllowedTokens for Reluctant {
    fn allows(&self, _: usize, token: TokenId) -> Option<bool> {
        is_set(&self.tells, token).then(|| !self.is_tired && is_set(&self.words, token))
    }
    fn all(&self, _: usize) -> &[u32] {
        &self.words
    }
}

proptest! {
    /// However the tokens are asked for, the draw is the best of those that are allowed.
    #[test]
    fn asking_one_by_one_draws_what_a_mask_draws(
        logits in prop::collection::vec(-4i8..4, 70),
        words in prop::collection::vec(any::<u32>(), 0..3),
        tells in prop::collection::vec(any::<u32>(), 3),
        temperature in prop::sample::select(vec![0.0, 0.0, 1.0]),
        bias in -3f32..3.0,
        is_tired: bool,
    ) {
        // Whole numbers, so that ties are frequent.
        let logits: Vec<f32> = logits.into_iter().map(f32::from).collect();
        let mut one = case(|p| {
            p.temperature = temperature;
            p.repetition_penalty = 1.5;
            p.logit_bias = vec![(TokenId(5), bias)];
        });
        one.outputs = vec![TokenId(1), TokenId(64)];
        one.allowed = Some(words.clone());
        let masked = one.try_sample(&logits, 2);
        let reluctant = Reluctant { words, tells, is_tired };
        let input = SampleInput {
            allowed: Some(Allowed::OfRow(&reluctant, 0)),
            ..one.input(2)
        };
        let asked = Sampler::new(70).unwrap().sample(&input, &mut logits.clone());
        prop_assert_eq!(&asked, &masked);
        // And it is the one that a mask before everything else leaves.
        if temperature == 0.0 {
            let mut plain = logits;
            plain.iter_mut().enumerate().for_each(|(token, logit)| {
                if !is_set(&reluctant.words, TokenId(token as u32)) { *logit = f32::NEG_INFINITY; }
            });
            one.allowed = None;
            prop_assert_eq!(masked, one.try_sample(&plain, 2));
        }
    }
}

#[test]
fn greedy_takes_the_lowest_id_of_a_tie() {
    let greedy = case(|p| p.temperature = 0.0);
    assert_eq!(greedy.token(&LOGITS, 0), 1);
    assert_eq!(greedy.token(&[-0.0, 0.0], 0), 0);
}

#[test]
fn draws_follow_the_softmax() {
    for temperature in [0.5, 1.0, 2.0] {
        let counts = case(|p| p.temperature = temperature).counts(&LOGITS, 40_000);
        assert_fits(&counts, &softmax(&LOGITS, f64::from(temperature)));
    }
}

#[test]
fn draws_follow_the_cut_distributions() {
    let full = softmax(&LOGITS, 1.0);
    let renormalised = |keep: &[usize]| {
        let sum: f64 = keep.iter().map(|i| full[*i]).sum();
        (0..8)
            .map(|i| if keep.contains(&i) { full[i] / sum } else { 0.0 })
            .collect::<Vec<_>>()
    };
    // Best first: 1 and 4 (0.286 each), 3 (0.174), 7 (0.105), 0 (0.052), 6 (0.039), 2 (0.014), 5 (0.002).
    assert_fits(
        &case(|p| p.top_k = Some(3)).counts(&LOGITS, 40_000),
        &renormalised(&[1, 4, 3]),
    );
    assert_fits(
        &case(|p| p.top_p = 0.8).counts(&LOGITS, 40_000),
        &renormalised(&[1, 4, 3, 7]),
    );
    assert_fits(
        &case(|p| p.min_p = 0.3).counts(&LOGITS, 40_000),
        &renormalised(&[1, 4, 3, 7]),
    );
    // Top-p counts within the top-k survivors: 0.286 / 0.747 twice reaches 0.7.
    let both = case(|p| (p.top_k, p.top_p) = (Some(3), 0.7));
    assert_fits(&both.counts(&LOGITS, 40_000), &renormalised(&[1, 4]));
    // And within the survivors of min-p: (2 * 0.286 + 0.174) / 0.851 is beyond 0.8.
    let both = case(|p| (p.min_p, p.top_p) = (0.3, 0.8));
    assert_fits(&both.counts(&LOGITS, 40_000), &renormalised(&[1, 4, 3]));
    assert_fits(&case(|p| p.top_k = Some(1)).counts(&LOGITS, 100), &renormalised(&[1]));
    assert_fits(&case(|p| p.top_p = 0.0).counts(&LOGITS, 100), &renormalised(&[1]));
}

#[test]
fn top_p_looks_as_far_as_it_must() {
    let flat = vec![0.0; 3_000];
    let counts = case(|p| p.top_p = 0.5).counts(&flat, 4_000);
    assert!(
        counts[..1_500].iter().sum::<u32>() == 4_000,
        "ties are kept from the lowest id"
    );
    assert!(
        counts[1_400..1_500].iter().sum::<u32>() > 100,
        "the far end of the kept set is drawn too"
    );
}

#[test]
fn neighbouring_draws_are_independent() {
    let even = case(|_| ());
    let mut pairs = [0; 4];
    for index in 0..10_000 {
        let (a, b) = (
            even.token(&[0.0, 0.0], 2 * index),
            even.token(&[0.0, 0.0], 2 * index + 1),
        );
        pairs[(2 * a + b) as usize] += 1;
    }
    assert_fits(&pairs, &[0.25; 4]);
}

#[test]
fn penalties_bias_and_masks() {
    let mut biased = case(|p| {
        p.temperature = 0.0;
        p.logit_bias = vec![(TokenId(5), 10.0), (TokenId(99), 10.0)];
    });
    assert_eq!(biased.token(&LOGITS, 0), 5);
    biased.stop.min_tokens = 2;
    biased.stop.stop_token_ids = vec![TokenId(5)];
    biased.stop.end_tokens = vec![TokenId(1)];
    assert_eq!(
        biased.token(&LOGITS, 1),
        4,
        "end and stop tokens are masked before min_tokens"
    );
    assert_eq!(biased.token(&LOGITS, 2), 5);

    let mut repeated = case(|p| (p.temperature, p.repetition_penalty) = (0.0, 2.0));
    repeated.prompt = vec![TokenId(1), TokenId(1)];
    repeated.outputs = vec![TokenId(4)];
    assert_eq!(
        repeated.token(&LOGITS, 0),
        3,
        "positive logits are divided once, whatever the count"
    );
    assert_eq!(
        repeated.token(&[-1.0, -1.5, -5.0, -5.0, -1.9], 0),
        0,
        "negative ones are multiplied"
    );

    let mut counted = case(|p| (p.temperature, p.frequency_penalty) = (0.0, 0.3));
    counted.outputs = vec![TokenId(1), TokenId(1), TokenId(4)];
    counted.prompt = vec![TokenId(3); 10];
    assert_eq!(
        counted.token(&LOGITS, 0),
        4,
        "two occurrences cost 0.6, one 0.3, prompt tokens nothing"
    );
    counted.params.frequency_penalty = 0.0;
    counted.params.presence_penalty = 0.6;
    assert_eq!(counted.token(&LOGITS, 0), 3, "presence costs the same however often");
}

#[test]
fn logprobs_are_of_the_raw_logits() {
    let mut reported = case(|p| {
        p.temperature = 0.0;
        p.logit_bias = vec![(TokenId(5), 10.0)];
    });
    reported.logprobs = Some(3);
    let sampled = reported.try_sample(&LOGITS, 0).unwrap();
    let logprobs = sampled.logprobs.unwrap();
    let right = softmax(&LOGITS, 1.0);
    assert_eq!(sampled.token, TokenId(5));
    assert!((f64::from(logprobs.logprob) - right[5].ln()).abs() < 1e-5);
    assert_eq!(logprobs.top.iter().map(|t| t.0.0).collect::<Vec<_>>(), [1, 4, 3]);
    assert!((f64::from(logprobs.top[2].1) - right[3].ln()).abs() < 1e-5);
    let echoed = prompt_logprob(&LOGITS, TokenId(5), 3).unwrap();
    assert_eq!(echoed, logprobs);
    reported.logprobs = Some(0);
    assert!(
        reported
            .try_sample(&LOGITS, 0)
            .unwrap()
            .logprobs
            .unwrap()
            .top
            .is_empty()
    );
}

#[test]
fn unusable_rows_are_errors() {
    let plain = case(|_| ());
    assert_eq!(
        plain.try_sample(&[0.0, f32::NAN], 0),
        Err(SampleError::NotFinite { token: 1 })
    );
    assert_eq!(
        plain.try_sample(&[f32::INFINITY, 0.0], 0),
        Err(SampleError::NotFinite { token: 0 })
    );
    assert_eq!(
        plain.try_sample(&[f32::NEG_INFINITY; 2], 0),
        Err(SampleError::NothingLeft)
    );
    assert_eq!(plain.try_sample(&[], 0), Err(SampleError::NothingLeft));
    // A penalty that no coordinator lets through.
    for (temperature, top_p) in [(0.0, 1.0), (1.0, 1.0), (1.0, 0.5)] {
        let mut tiny = case(|p| (p.temperature, p.top_p, p.repetition_penalty) = (temperature, top_p, 2e-38));
        tiny.prompt = vec![TokenId(0)];
        assert_eq!(tiny.try_sample(&[20.0, 1.0], 0), Err(SampleError::NothingLeft));
    }
    assert!(matches!(
        prompt_logprob(&LOGITS, TokenId(8), 0),
        Err(SampleError::NoSuchToken { .. })
    ));
    assert!(matches!(
        prompt_logprob(&[f32::NAN], TokenId(0), 0),
        Err(SampleError::NotFinite { .. })
    ));
    assert!(matches!(
        Sampler::new(u32::MAX),
        Err(SampleError::VocabularyTooLarge { .. })
    ));
    let wrong = Sampler::new(3).unwrap().sample(&plain.input(0), &mut [0.0; 2]);
    assert_eq!(
        wrong,
        Err(SampleError::WrongLength {
            logits: 2,
            vocab_size: 3
        })
    );
}

/// Pinned draws: a change of any step of the definition, or of a machine's arithmetic, shows here.
#[test]
fn the_stream_is_pinned() {
    let logits: Vec<f32> = (0..500).map(|i| ((i * 7919) % 1_000) as f32 * 0.008).collect();
    let plain = case(|_| ());
    let drawn: Vec<u32> = (0..12).map(|index| plain.token(&logits, index)).collect();
    let cut = case(|p| (p.temperature, p.top_k, p.top_p, p.min_p) = (0.7, Some(50), 0.9, 0.05));
    let drawn_cut: Vec<u32> = (0..12).map(|index| cut.token(&logits, index)).collect();
    assert_eq!(drawn, PINNED);
    assert_eq!(drawn_cut, PINNED_CUT);
}
const PINNED: [u32; 12] = [136, 62, 137, 499, 112, 112, 174, 173, 223, 321, 39, 27];
const PINNED_CUT: [u32; 12] = [457, 210, 457, 322, 136, 136, 62, 62, 346, 87, 247, 284];

proptest! {
    #[test]
    fn cuts_never_draw_outside_and_scratch_never_leaks(
        logits in prop::collection::vec(-20f32..20.0, 2..300),
        temperature in 0.01f32..3.0,
        top_k in prop::option::of(1u32..400),
        top_p in 0f32..=1.0,
        min_p in 0f32..=1.0,
        seed: u64,
    ) {
        let mut one = case(|p| {
            p.temperature = temperature;
            p.top_k = top_k;
            p.top_p = top_p;
            p.min_p = min_p;
            p.frequency_penalty = 0.1;
        });
        one.seed = seed;
        one.outputs = vec![TokenId(0), TokenId(1), TokenId(0)];
        let token = one.token(&logits, 3);
        let mut adjusted = logits.clone();
        adjusted[0] -= 0.2;
        adjusted[1] -= 0.1;
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|a, b| adjusted[*b].total_cmp(&adjusted[*a]).then(a.cmp(b)));
        let rank = order.iter().position(|id| *id == token as usize).unwrap();
        prop_assert!(top_k.is_none_or(|k| rank < k as usize));
        let probabilities = softmax(&adjusted, f64::from(temperature));
        prop_assert!(probabilities[token as usize] >= f64::from(min_p) * probabilities[order[0]] * 0.999);
        let first_k = order.iter().take(top_k.unwrap_or(u32::MAX) as usize).map(|i| probabilities[*i]);
        let survivors: f64 = first_k.filter(|p| *p >= f64::from(min_p) * probabilities[order[0]] * 0.999).sum();
        let before: f64 = order[..rank].iter().map(|id| probabilities[*id]).sum();
        prop_assert!(before <= f64::from(top_p) * survivors * 1.001 + 1e-9);

        // One sampler used twice, with other work between, draws what a fresh one draws.
        one.logprobs = Some(2);
        let input = one.input(3);
        let mut sampler = Sampler::new(logits.len() as u32).unwrap();
        for _ in 0..2 {
            prop_assert_eq!(sampler.sample(&input, &mut logits.clone()).unwrap().token.0, token);
        }
    }
}

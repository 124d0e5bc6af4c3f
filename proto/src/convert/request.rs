//! The validated request, its sampling and stop conditions.

use std::sync::Arc;
use std::time::Duration;

use serving_core::ids::{Attempt, CacheTenant, PrefixSalt, TokenId};
use serving_core::request::{
    Lane, OutputConstraint, OutputGrammar, REPETITION_PENALTY_MIN, Request, SamplingParams, StopConditions,
};

use super::{ConvertError, Result, at_most, id_to_wire, nanos, request_id, required, unknown};
use crate::v1;

/// Far above any context length in reach. The message size limit is reached first.
const PROMPT_TOKENS_MAX: usize = 1 << 20;
/// OpenAI allows 300 entries; a token list of a whole vocabulary is refused.
const LOGIT_BIAS_MAX: usize = 4096;
const STOP_TOKENS_MAX: usize = 4096;
/// Bytes of a grammar. The HTTP edge allows a client less (`coordinator/src/api/limits.rs`).
const GRAMMAR_BYTES_MAX: usize = 128 << 10;
/// A vocabulary in reach has no more tokens.
const ALLOWED_TOKENS_MAX: usize = 1 << 20;
const BAD_WORDS_MAX: usize = 4096;
const BAD_WORD_TOKENS_MAX: usize = 4096;
/// The wire's limit. The HTTP edge allows a client 16 (`coordinator/src/api/limits.rs`).
const CHOICES_MAX: u32 = 128;
/// Alternatives per token; clients ask for at most 20.
pub(super) const TOP_LOGPROBS_MAX: u32 = 256;

pub(super) fn request_to_wire(request: Request, attempt: Attempt) -> v1::GenerateRequest {
    v1::GenerateRequest {
        request_id: id_to_wire(request.id.0),
        attempt: attempt.0,
        prompt: request.prompt.iter().map(|token| token.0).collect(),
        client_prompt_tokens: request.client_prompt_tokens,
        sampling: Some(sampling_to_wire(request.sampling)),
        constraint: constraint_to_wire(&request.constraint),
        stop: Some(v1::StopConditions {
            max_tokens: request.stop.max_tokens,
            min_tokens: request.stop.min_tokens,
            end_tokens: numbers(&request.stop.end_tokens),
            stop_token_ids: numbers(&request.stop.stop_token_ids),
        }),
        choice_count: request.choice_count,
        seed: request.seed,
        logprobs: request.logprobs,
        prompt_logprobs: request.prompt_logprobs,
        prefix_salt: request.prefix_salt.map(|salt| salt.0),
        cache_tenant: request.cache_tenant.map(|tenant| tenant.0),
        report_kv_hashes: request.report_kv_hashes,
        lane: match request.lane {
            Lane::Interactive => v1::Lane::Interactive,
            Lane::Batch => v1::Lane::Batch,
        }
        .into(),
        time_left_ns: nanos(request.time_limit),
    }
}

pub(super) fn request_from_wire(wire: Option<v1::GenerateRequest>) -> Result<(Request, Attempt)> {
    let wire = required(wire, "request")?;
    let prompt: Arc<[TokenId]> = at_most(wire.prompt, PROMPT_TOKENS_MAX, "request.prompt")?
        .into_iter()
        .map(TokenId)
        .collect();
    if prompt.is_empty() {
        return Err(ConvertError::Missing {
            field: "request.prompt",
        });
    }
    if wire.client_prompt_tokens == 0 || wire.client_prompt_tokens as usize > prompt.len() {
        return Err(ConvertError::OutOfRange {
            field: "request.client_prompt_tokens",
            value: wire.client_prompt_tokens.to_string(),
            allowed: "1 to the prompt's length",
        });
    }
    if wire.choice_count == 0 || wire.choice_count > CHOICES_MAX {
        return Err(ConvertError::OutOfRange {
            field: "request.choice_count",
            value: wire.choice_count.to_string(),
            allowed: "1 to 128",
        });
    }
    let lane = match v1::Lane::try_from(wire.lane) {
        Ok(v1::Lane::Interactive) => Lane::Interactive,
        Ok(v1::Lane::Batch) => Lane::Batch,
        _ => return Err(unknown("request.lane", wire.lane)),
    };
    let request = Request {
        id: request_id(&wire.request_id, "request.request_id")?,
        prompt,
        client_prompt_tokens: wire.client_prompt_tokens,
        sampling: sampling_from_wire(required(wire.sampling, "request.sampling")?)?,
        constraint: Arc::new(constraint_from_wire(wire.constraint.unwrap_or_default())?),
        stop: stop_from_wire(required(wire.stop, "request.stop")?)?,
        choice_count: wire.choice_count,
        seed: wire.seed,
        logprobs: top_count(wire.logprobs, "request.logprobs")?,
        prompt_logprobs: top_count(wire.prompt_logprobs, "request.prompt_logprobs")?,
        prefix_salt: wire.prefix_salt.map(PrefixSalt),
        cache_tenant: wire.cache_tenant.map(CacheTenant),
        report_kv_hashes: wire.report_kv_hashes,
        share: None,
        priority: 0,
        lane,
        time_limit: Duration::from_nanos(wire.time_left_ns),
    };
    Ok((request, Attempt(wire.attempt)))
}

fn numbers(tokens: &[TokenId]) -> Vec<u32> {
    tokens.iter().map(|token| token.0).collect()
}

fn top_count(count: Option<u32>, field: &'static str) -> Result<Option<u32>> {
    match count {
        Some(count) if count > TOP_LOGPROBS_MAX => Err(ConvertError::OutOfRange {
            field,
            value: count.to_string(),
            allowed: "0 to 256",
        }),
        other => Ok(other),
    }
}

fn stop_from_wire(wire: v1::StopConditions) -> Result<StopConditions> {
    let tokens = |list: Vec<u32>, field| -> Result<Vec<TokenId>> {
        Ok(at_most(list, STOP_TOKENS_MAX, field)?
            .into_iter()
            .map(TokenId)
            .collect())
    };
    Ok(StopConditions {
        max_tokens: wire.max_tokens,
        min_tokens: wire.min_tokens,
        end_tokens: tokens(wire.end_tokens, "request.stop.end_tokens")?,
        stop_token_ids: tokens(wire.stop_token_ids, "request.stop.stop_token_ids")?,
    })
}

fn constraint_to_wire(constraint: &OutputConstraint) -> Option<v1::OutputConstraint> {
    let words = constraint.bad_words.iter();
    (!constraint.is_none()).then(|| v1::OutputConstraint {
        allowed_tokens: numbers(&constraint.allowed_tokens),
        bad_words: words.map(|word| v1::TokenSequence { tokens: numbers(word) }).collect(),
        grammar: constraint.grammar.as_ref().map(|grammar| match grammar {
            OutputGrammar::JsonSchema(schema) => v1::output_constraint::Grammar::JsonSchema(schema.to_string()),
            OutputGrammar::Regex(regex) => v1::output_constraint::Grammar::Regex(regex.to_string()),
            OutputGrammar::Lark(rules) => v1::output_constraint::Grammar::Lark(rules.to_string()),
        }),
    })
}

fn constraint_from_wire(wire: v1::OutputConstraint) -> Result<OutputConstraint> {
    const FIELD: &str = "request.constraint.grammar";
    let text = |text: String| match text.len() {
        ..=GRAMMAR_BYTES_MAX => Ok(Arc::from(text)),
        bytes => Err(ConvertError::OutOfRange {
            field: FIELD,
            value: format!("{bytes} bytes"),
            allowed: "at most 128 KiB",
        }),
    };
    let grammar = wire.grammar.map(|grammar| {
        Ok(match grammar {
            v1::output_constraint::Grammar::JsonSchema(schema) => OutputGrammar::JsonSchema(text(schema)?),
            v1::output_constraint::Grammar::Regex(regex) => OutputGrammar::Regex(text(regex)?),
            v1::output_constraint::Grammar::Lark(rules) => OutputGrammar::Lark(text(rules)?),
        })
    });
    let words = at_most(wire.bad_words, BAD_WORDS_MAX, "request.constraint.bad_words")?;
    let word = |word: v1::TokenSequence| {
        const FIELD: &str = "request.constraint.bad_words.tokens";
        let tokens = at_most(word.tokens, BAD_WORD_TOKENS_MAX, FIELD)?;
        if tokens.is_empty() {
            return Err(ConvertError::Missing { field: FIELD });
        }
        Ok(tokens.into_iter().map(TokenId).collect())
    };
    let allowed = at_most(
        wire.allowed_tokens,
        ALLOWED_TOKENS_MAX,
        "request.constraint.allowed_tokens",
    )?;
    Ok(OutputConstraint {
        grammar: grammar.transpose()?,
        allowed_tokens: allowed.into_iter().map(TokenId).collect(),
        bad_words: words.into_iter().map(word).collect::<Result<_>>()?,
    })
}

fn sampling_to_wire(sampling: SamplingParams) -> v1::SamplingParams {
    v1::SamplingParams {
        temperature: sampling.temperature,
        top_k: sampling.top_k,
        top_p: sampling.top_p,
        min_p: sampling.min_p,
        presence_penalty: sampling.presence_penalty,
        frequency_penalty: sampling.frequency_penalty,
        repetition_penalty: sampling.repetition_penalty,
        logit_bias: sampling
            .logit_bias
            .into_iter()
            .map(|(token, bias)| v1::LogitBias { token: token.0, bias })
            .collect(),
    }
}

fn sampling_from_wire(wire: v1::SamplingParams) -> Result<SamplingParams> {
    let bias = at_most(wire.logit_bias, LOGIT_BIAS_MAX, "request.sampling.logit_bias")?;
    if bias.windows(2).any(|pair| pair[0].token >= pair[1].token) {
        return Err(ConvertError::Inconsistent {
            field: "request.sampling.logit_bias",
            why: "token ids must rise",
        });
    }
    let logit_bias = bias
        .into_iter()
        .map(|entry| {
            Ok((
                TokenId(entry.token),
                within(entry.bias, Span::MODERATE, "request.sampling.logit_bias")?,
            ))
        })
        .collect::<Result<Vec<_>>>()?;
    if wire.top_k == Some(0) {
        return Err(ConvertError::OutOfRange {
            field: "request.sampling.top_k",
            value: "0".to_owned(),
            allowed: "1 and up, or absent",
        });
    }
    Ok(SamplingParams {
        temperature: within(wire.temperature, Span::NOT_NEGATIVE, "request.sampling.temperature")?,
        top_k: wire.top_k,
        top_p: within(wire.top_p, Span::UNIT, "request.sampling.top_p")?,
        min_p: within(wire.min_p, Span::UNIT, "request.sampling.min_p")?,
        presence_penalty: within(
            wire.presence_penalty,
            Span::MODERATE,
            "request.sampling.presence_penalty",
        )?,
        frequency_penalty: within(
            wire.frequency_penalty,
            Span::MODERATE,
            "request.sampling.frequency_penalty",
        )?,
        repetition_penalty: within(
            wire.repetition_penalty,
            Span::REPETITION_PENALTY,
            "request.sampling.repetition_penalty",
        )?,
        logit_bias,
    })
}

struct Span {
    least: f32,
    most: f32,
    words: &'static str,
}

impl Span {
    const NOT_NEGATIVE: Span = Span {
        least: 0.0,
        most: f32::MAX,
        words: "0 and up",
    };
    const UNIT: Span = Span {
        least: 0.0,
        most: 1.0,
        words: "0 to 1",
    };
    const REPETITION_PENALTY: Span = Span {
        least: REPETITION_PENALTY_MIN,
        most: f32::MAX,
        words: "0.01 and up",
    };
    /// What is added to a logit, or taken from it for each of up to millions of tokens. No logit leaves the range of f32 by it.
    const MODERATE: Span = Span {
        least: -1e6,
        most: 1e6,
        words: "-1e6 to 1e6",
    };
}

fn within(value: f32, span: Span, field: &'static str) -> Result<f32> {
    // The comparison is false for NaN, as it must be.
    if value >= span.least && value <= span.most {
        return Ok(value);
    }
    Err(ConvertError::OutOfRange {
        field,
        value: value.to_string(),
        allowed: span.words,
    })
}

//! Turns a client's JSON into a checked `CheckedRequest`: every field has a type and a range. Nothing is tokenized yet.

use serde_json::{Map, Value};
use serving_core::ids::TokenId;
use serving_core::request::SamplingParams;

use super::AppState;
use super::error::ApiError;
use super::fields::{Endpoint, check_names};
use super::json::{Fields, short, whole};
use super::limits::*;
use super::prompt::{Input, chat_turns, prompt_sources};

/// What the client asked for, checked field by field.
#[derive(Debug)]
pub struct CheckedRequest {
    pub endpoint: Endpoint,
    /// The served name that the client used. Answers repeat it.
    pub model: String,
    pub input: Input,
    pub sampling: SamplingParams,
    /// `None`: the endpoint's default.
    pub max_tokens: Option<u32>,
    /// The field `max_tokens` came from, for messages.
    pub max_tokens_field: &'static str,
    pub min_tokens: u32,
    pub ignore_eos: bool,
    pub stop_strings: Vec<String>,
    pub stop_token_ids: Vec<TokenId>,
    pub choice_count: u32,
    pub seed: Option<u64>,
    /// `Some(k)`: logprobs with the k best alternatives.
    pub logprobs: Option<u32>,
    pub echo: bool,
    pub reply: ReplyOptions,
}

/// The form of the answer. The nodes need to know nothing of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReplyOptions {
    pub is_streaming: bool,
    pub include_usage: bool,
    pub continuous_usage: bool,
    pub return_token_ids: bool,
    pub include_metrics: bool,
    pub return_kv_hashes: bool,
}

pub fn plan(state: &AppState, endpoint: Endpoint, body: &Map<String, Value>) -> Result<CheckedRequest, ApiError> {
    let fields = Fields::new(body);
    let model = model(state, &fields)?;
    check_names(&fields, endpoint, &state.ignored_names)?;
    let vocab_size = state.text.codec().vocab_size();
    let echo = endpoint == Endpoint::Completions && fields.bool("echo")?.unwrap_or(false);
    let (max_tokens, max_tokens_field) = max_tokens(&fields, endpoint, echo)?;
    if let Some(user) = fields.string("user")?
        && user.len() > LABEL_CHARS_MAX
    {
        return Err(ApiError::invalid(
            "user",
            format!("`user` must be at most {LABEL_CHARS_MAX} bytes long."),
        ));
    }
    let min_tokens = fields.u32("min_tokens", 0, u32::MAX)?.unwrap_or(0);
    if let Some(max) = max_tokens
        && min_tokens > max
    {
        let message = format!("`min_tokens` ({min_tokens}) must not exceed `{max_tokens_field}` ({max}).");
        return Err(ApiError::invalid("min_tokens", message));
    }
    Ok(CheckedRequest {
        endpoint,
        model,
        sampling: sampling(&fields, vocab_size)?,
        max_tokens,
        max_tokens_field,
        min_tokens,
        ignore_eos: fields.bool("ignore_eos")?.unwrap_or(false),
        stop_strings: stop_strings(&fields)?,
        stop_token_ids: stop_token_ids(&fields, vocab_size)?,
        choice_count: fields.u32("n", 1, CHOICES_MAX)?.unwrap_or(1),
        seed: seed(&fields)?,
        logprobs: logprobs(&fields, endpoint)?,
        echo,
        reply: reply_options(&fields)?,
        input: match endpoint {
            Endpoint::Completions => Input::Prompts(prompt_sources(&fields, vocab_size)?),
            Endpoint::Chat => Input::Chat(chat_turns(&fields)?),
        },
    })
}

/// The served name in `model`, checked.
pub fn model(state: &AppState, fields: &Fields<'_>) -> Result<String, ApiError> {
    let Some(asked) = fields.string("model")? else {
        let message = format!(
            "`model` is missing. This server serves: {}.",
            state.served_models.join(", ")
        );
        return Err(ApiError::invalid("model", message));
    };
    if !state.served_models.iter().any(|served| served == asked) {
        return Err(ApiError::unknown_model(asked, &state.served_models));
    }
    Ok(asked.to_owned())
}

fn max_tokens(fields: &Fields<'_>, endpoint: Endpoint, echo: bool) -> Result<(Option<u32>, &'static str), ApiError> {
    let mut name = "max_tokens";
    if endpoint == Endpoint::Chat && fields.get("max_completion_tokens").is_some() {
        name = "max_completion_tokens";
    }
    // Values beyond any context are no type error. They end as context_length_exceeded, which names the limit.
    let asked = fields.u32(name, 0, u32::MAX)?;
    if asked == Some(0) && !echo {
        let hint = if endpoint == Endpoint::Completions {
            " (0 only together with `echo`)"
        } else {
            ""
        };
        return Err(ApiError::invalid(name, format!("`{name}` must be at least 1{hint}.")));
    }
    Ok((asked, name))
}

fn sampling(fields: &Fields<'_>, vocab_size: u32) -> Result<SamplingParams, ApiError> {
    let float = |name: &str, low: f64, high: f64, default: f64| -> Result<f32, ApiError> {
        Ok(fields.float(name, low, high)?.unwrap_or(default) as f32)
    };
    let repetition_penalty = float("repetition_penalty", 0.0, REPETITION_PENALTY_MAX, 1.0)?;
    if repetition_penalty <= 0.0 {
        return Err(ApiError::invalid(
            "repetition_penalty",
            "`repetition_penalty` must be above 0; 1 turns it off.",
        ));
    }
    Ok(SamplingParams {
        temperature: float("temperature", 0.0, TEMPERATURE_MAX, 1.0)?,
        // In vLLM's spelling 0 and -1 keep all tokens.
        top_k: fields
            .integer("top_k", -1, i64::from(i32::MAX))?
            .and_then(|k| u32::try_from(k).ok())
            .filter(|k| *k > 0 && *k < vocab_size),
        // 0 keeps the likeliest token alone, as the smallest positive share does.
        top_p: float("top_p", 0.0, 1.0, 1.0)?.max(f32::MIN_POSITIVE),
        min_p: float("min_p", 0.0, 1.0, 0.0)?,
        presence_penalty: float("presence_penalty", -PENALTY_MAX, PENALTY_MAX, 0.0)?,
        frequency_penalty: float("frequency_penalty", -PENALTY_MAX, PENALTY_MAX, 0.0)?,
        repetition_penalty,
        logit_bias: logit_bias(fields, vocab_size)?,
    })
}

fn logit_bias(fields: &Fields<'_>, vocab_size: u32) -> Result<Vec<(TokenId, f32)>, ApiError> {
    let Some(map) = fields.object("logit_bias")? else {
        return Ok(Vec::new());
    };
    if map.len() > LOGIT_BIAS_ENTRIES_MAX {
        let message = format!(
            "`logit_bias` has {} entries, the limit is {LOGIT_BIAS_ENTRIES_MAX}.",
            map.len()
        );
        return Err(ApiError::invalid("logit_bias", message));
    }
    let mut biases = Vec::with_capacity(map.len());
    for (key, value) in map {
        let token = key.parse::<u32>().ok().filter(|id| *id < vocab_size).ok_or_else(|| {
            let message = format!(
                "`logit_bias` names {:?}: keys must be token ids from 0 to {}.",
                short(key),
                vocab_size - 1
            );
            ApiError::invalid("logit_bias", message)
        })?;
        let bias = value
            .as_f64()
            .filter(|bias| bias.abs() <= LOGIT_BIAS_MAX)
            .ok_or_else(|| {
                let message = format!("`logit_bias` of token {token} must be a number from -100 to 100.");
                ApiError::invalid("logit_bias", message)
            })?;
        biases.push((TokenId(token), bias as f32));
    }
    biases.sort_by_key(|(token, _)| *token);
    // "7" and "07" are two keys and one token. Which of them counts would be a guess.
    if let Some(pair) = biases.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        return Err(ApiError::invalid(
            "logit_bias",
            format!("`logit_bias` names token {} twice.", pair[0].0),
        ));
    }
    Ok(biases)
}

fn stop_strings(fields: &Fields<'_>) -> Result<Vec<String>, ApiError> {
    let list = match fields.get("stop") {
        None => return Ok(Vec::new()),
        Some(Value::String(one)) => vec![one.clone()],
        Some(Value::Array(list)) => list
            .iter()
            .enumerate()
            .map(|(i, item)| {
                let text = item.as_str().map(str::to_owned);
                let wrong = || fields.wrong(&format!("stop[{i}]"), "a string", item);
                text.ok_or_else(|| ApiError {
                    param: Some("stop".to_owned()),
                    ..wrong()
                })
            })
            .collect::<Result<_, _>>()?,
        Some(other) => return Err(fields.wrong("stop", "a string or a list of strings", other)),
    };
    if list.len() > STOP_STRINGS_MAX {
        let message = format!("`stop` has {} strings, the limit is {STOP_STRINGS_MAX}.", list.len());
        return Err(ApiError::invalid("stop", message));
    }
    if list
        .iter()
        .any(|stop| stop.is_empty() || stop.chars().count() > STOP_STRING_CHARS_MAX)
    {
        let message = format!("`stop` strings must be 1 to {STOP_STRING_CHARS_MAX} characters long.");
        return Err(ApiError::invalid("stop", message));
    }
    Ok(list)
}

fn stop_token_ids(fields: &Fields<'_>, vocab_size: u32) -> Result<Vec<TokenId>, ApiError> {
    let list = fields.array("stop_token_ids")?.map(Vec::as_slice).unwrap_or_default();
    if list.len() > STOP_TOKEN_IDS_MAX {
        let message = format!(
            "`stop_token_ids` has {} ids, the limit is {STOP_TOKEN_IDS_MAX}.",
            list.len()
        );
        return Err(ApiError::invalid("stop_token_ids", message));
    }
    list.iter()
        .enumerate()
        .map(|(i, id)| token_id(id, &format!("stop_token_ids[{i}]"), vocab_size))
        .collect()
}

/// One token id of the vocabulary.
pub fn token_id(value: &Value, name: &str, vocab_size: u32) -> Result<TokenId, ApiError> {
    whole(value)
        .and_then(|id| u32::try_from(id).ok())
        .filter(|id| *id < vocab_size)
        .map(TokenId)
        .ok_or_else(|| {
            let top = name.split('[').next().unwrap_or(name);
            let got = super::json::describe(value);
            ApiError::invalid(
                top,
                format!("`{name}` must be a token id from 0 to {}, not {got}.", vocab_size - 1),
            )
        })
}

fn seed(fields: &Fields<'_>) -> Result<Option<u64>, ApiError> {
    let Some(value) = fields.get("seed") else {
        return Ok(None);
    };
    // Signed and unsigned 64-bit numbers are both seeds. A negative one is taken by its bits.
    let seed = value.as_u64().or_else(|| value.as_i64().map(i64::cast_unsigned));
    seed.map(Some)
        .ok_or_else(|| fields.wrong("seed", "a whole number of at most 64 bits", value))
}

fn logprobs(fields: &Fields<'_>, endpoint: Endpoint) -> Result<Option<u32>, ApiError> {
    if endpoint == Endpoint::Completions {
        if fields.get("logprobs").and_then(Value::as_bool) == Some(false) {
            return Ok(None);
        }
        return fields.u32("logprobs", 0, LOGPROBS_MAX);
    }
    let wanted = fields.bool("logprobs")?.unwrap_or(false);
    let top = fields.u32("top_logprobs", 0, LOGPROBS_MAX)?;
    if top.is_some_and(|top| top > 0) && !wanted {
        return Err(ApiError::invalid(
            "top_logprobs",
            "`top_logprobs` needs `logprobs` to be true.",
        ));
    }
    Ok(wanted.then_some(top.unwrap_or(0)))
}

fn reply_options(fields: &Fields<'_>) -> Result<ReplyOptions, ApiError> {
    let is_streaming = fields.bool("stream")?.unwrap_or(false);
    let (mut include_usage, mut continuous_usage) = (false, false);
    if let Some(options) = fields.object("stream_options")? {
        if !is_streaming {
            return Err(ApiError::invalid(
                "stream_options",
                "`stream_options` needs `stream` to be true.",
            ));
        }
        let options = Fields::nested(options, "stream_options.".to_owned());
        include_usage = options.bool("include_usage")?.unwrap_or(false);
        continuous_usage = options.bool("continuous_usage_stats")?.unwrap_or(false);
    }
    Ok(ReplyOptions {
        is_streaming,
        include_usage,
        continuous_usage,
        return_token_ids: fields.bool("return_token_ids")?.unwrap_or(false),
        include_metrics: fields.bool("include_metrics")?.unwrap_or(false),
        return_kv_hashes: fields.bool("return_kv_hashes")?.unwrap_or(false),
    })
}

//! Turns a checked plan into validated requests: template, tokenizer, and the context length that they must fit.

use std::sync::Arc;

use serving_core::cluster::answer_tokens_max;
use serving_core::ids::{PrefixSalt, RequestId, TokenId};
use serving_core::node::NodeCapacity;
use serving_core::request::{OutputConstraint, Request, StopConditions};

use super::AppState;
use super::body::Held;
use super::error::ApiError;
use super::limits::{COUNTED_CONTEXTS, PROMPT_LOGPROBS_MAX};
use super::long_text::on_text;
use super::prompt::{ChatEnding, Input, PromptSource};
use super::record::RequestLabels;
use super::request::{CheckedRequest, Endpoint, Truncation};
use crate::keys::{TenantSalt, prefix_salt};
use crate::text::{Chat, TextError, TextModel, hide_control};

/// vLLM and OpenAI generate this many tokens on /v1/completions when the client does not say.
const COMPLETIONS_MAX_TOKENS_DEFAULT: u32 = 16;

/// One prompt, tokenized.
#[derive(Clone, Debug)]
pub struct Prompt {
    pub tokens: Arc<[TokenId]>,
    /// With `echo`: the prompt as text, if the context holds it.
    pub echo_text: Option<String>,
}

/// What nodes need of a body, in tokens.
#[derive(Debug)]
pub struct Tokenized {
    pub prompts: Vec<Prompt>,
    pub constraint: Arc<OutputConstraint>,
}

/// `tenant`: the request may use grammars that were compiled for this tenant.
pub async fn tokenized(
    state: &AppState,
    plan: &mut CheckedRequest,
    (held, tenant): (Held, Option<TenantSalt>),
) -> Result<Tokenized, ApiError> {
    let held_longer = held.without_bytes();
    let prompts = prompts(state, plan, held).await?;
    let constraint = std::mem::take(&mut plan.constraint);
    let constraint = constraint.prepare(state, (held_longer, salt(plan, tenant))).await?;
    let constraint = Arc::new(constraint);
    Ok(Tokenized { prompts, constraint })
}

/// The salt of what a request leaves behind for later requests. Requests with different salts do not share it.
fn salt(plan: &CheckedRequest, tenant: Option<TenantSalt>) -> Option<PrefixSalt> {
    prefix_salt(tenant, plan.fields.cache_salt.map(|salt| salt.0))
}

/// Tokenizes a text that may fit the context. A text that cannot fit is refused before, or as soon as this becomes clear.
async fn prompts(state: &AppState, plan: &mut CheckedRequest, held: Held) -> Result<Vec<Prompt>, ApiError> {
    let param = plan.endpoint.prompt_field();
    let input = std::mem::replace(&mut plan.input, Input::Prompts(Vec::new()));
    let bytes = input.work_bytes();
    let longest = match &input {
        Input::Prompts(list) => list.iter().map(PromptSource::text_bytes).max().unwrap_or(0),
        Input::Chat(chat, _) => chat.text_bytes(),
    };
    let limit = state.text.max_model_tokens as usize;
    let tokens_max = limit * COUNTED_CONTEXTS;
    let read_max = if plan.truncation.is_some() { tokens_max } else { limit };
    check_length(&state.text, longest, (read_max, param))?;
    let tokenizing = Tokenizing {
        tokens_max,
        kept_max: plan.truncation.map(|truncation| match truncation {
            Truncation::Tokens(tokens) => tokens as usize,
            Truncation::Context => limit.saturating_sub(output_beside(plan) as usize).max(1),
        }),
        add_special: plan.fields.add_special_tokens.map(|wanted| wanted.0),
        echo: plan.fields.echo.0,
        text_controls: plan.fields.allow_special_tokens.0,
    };
    let text = state.text.clone();
    let work = move || tokenizing.run(&text, input, |error| text_error(&text, error, param));
    on_text(state, (bytes, held), work).await
}

/// A prompt that is cut to the context leaves room for so many output tokens.
fn output_beside(plan: &CheckedRequest) -> u32 {
    plan.max_tokens
        .unwrap_or_else(|| least_default(plan.endpoint, plan.min_tokens))
}

/// The least default length of an answer for which the context has room. A chat goes on for as long as there is room.
fn least_default(endpoint: Endpoint, min_tokens: u32) -> u32 {
    match endpoint {
        // A client whose `min_tokens` is above the default gets so many.
        Endpoint::Completions => COMPLETIONS_MAX_TOKENS_DEFAULT.max(min_tokens),
        Endpoint::Chat | Endpoint::Responses => min_tokens.max(1),
    }
}

/// Refuses a text that has too many bytes for so many tokens, however it is split into tokens.
fn check_length(text: &TextModel, bytes: usize, (tokens_max, param): (usize, &str)) -> Result<(), ApiError> {
    let fewest = text.fewest_tokens(bytes);
    if fewest <= tokens_max {
        return Ok(());
    }
    let message = format!(
        "{} The prompt is too long: its {bytes} bytes are at least {fewest}. Shorten it.",
        context_words(text.max_model_tokens)
    );
    Err(ApiError::too_long(param, message))
}

/// The sentence by which LiteLLM and others know that a prompt is too long. LangChain looks for the words "prompt is too long", which
/// have to follow.
fn context_words(limit: u32) -> String {
    format!("This model's maximum context length is {limit} tokens.")
}

/// How a text becomes tokens.
#[derive(Clone, Copy, Debug)]
pub struct Tokenizing {
    pub tokens_max: usize,
    /// Only the last so many tokens of a prompt are kept, a begin token in front of them included.
    pub kept_max: Option<usize>,
    /// A prompt gets the special tokens unless the client says otherwise. A chat does not: its template has them.
    pub add_special: Option<bool>,
    /// Keep the prompt as text.
    pub echo: bool,
    /// Whether the text of a control token in a message becomes that control token. In a prompt without a template it always does.
    pub text_controls: bool,
}

impl Tokenizing {
    /// `refuse` says what is wrong with a text.
    pub fn run(
        self,
        text: &TextModel,
        input: Input,
        refuse: impl Fn(&TextError) -> ApiError,
    ) -> Result<Vec<Prompt>, ApiError> {
        let prompts: Result<Vec<Prompt>, TextError> = match input {
            Input::Prompts(sources) => sources.into_iter().map(|source| self.prompt(text, source)).collect(),
            Input::Chat(chat, ending) => self.chat(text, chat.for_template()?, ending).map(|prompt| vec![prompt]),
        };
        prompts.map_err(|error| refuse(&error))
    }

    fn prompt(self, text: &TextModel, source: PromptSource) -> Result<Prompt, TextError> {
        let (tokens, string, add_special) = match source {
            PromptSource::Text(string) => {
                let add_special = self.add_special.unwrap_or(true);
                let tokens = text.codec().encode(&string, add_special, self.tokens_max)?;
                (tokens, Some(string), add_special)
            }
            PromptSource::Tokens(ids) => (ids, None, false),
        };
        let count = tokens.len();
        let (kept, in_front) = self.kept(text, tokens, add_special);
        let whole = string.filter(|_| kept.len() == count);
        // A prompt beyond the context is refused by its number of tokens. Its text may be a hundred times as long as its ids.
        let is_shown = self.echo && kept.len() <= text.max_model_tokens as usize;
        Ok(Prompt {
            echo_text: is_shown.then(|| whole.unwrap_or_else(|| text.decode(&kept[in_front..], true))),
            tokens: Arc::from(kept),
        })
    }

    fn chat(self, text: &TextModel, chat: Chat, ending: ChatEnding) -> Result<Prompt, TextError> {
        let (chat, mark) = match self.text_controls {
            true => (chat, None),
            false => hide_control(text.codec(), chat)?,
        };
        let rendered = match ending {
            ChatEnding::LastMessage => up_to_last_message(text, chat)?,
            ChatEnding::NewMessage => text.render_chat(&chat, true)?,
            ChatEnding::Nothing => text.render_chat(&chat, false)?,
        };
        let limits = (self.add_special.unwrap_or(false), self.tokens_max);
        let tokens = match mark {
            None => text.codec().encode(&rendered, limits.0, limits.1)?,
            Some(mark) => text.codec().encode_hidden(&rendered, mark, limits)?,
        };
        let (kept, _) = self.kept(text, tokens, limits.0);
        Ok(Prompt {
            tokens: Arc::from(kept),
            echo_text: None,
        })
    }

    /// The last tokens of a prompt, and how many tokens of the tokenizer stand in front of them: where it has put a begin token in
    /// front of a text that is cut, it stays there. vLLM does the same, and some models say nothing sensible without it.
    fn kept(self, text: &TextModel, tokens: Vec<TokenId>, add_special: bool) -> (Vec<TokenId>, usize) {
        match self.kept_max.filter(|most| *most < tokens.len()) {
            None => (tokens, 0),
            Some(most) => {
                let begin = add_special && text.codec().info().adds_begin;
                cut(tokens, most, usize::from(begin))
            }
        }
    }
}

/// The last tokens of a prompt that has more than `most`. The first `in_front` of all stay, if there is room for another one.
fn cut(mut tokens: Vec<TokenId>, most: usize, in_front: usize) -> (Vec<TokenId>, usize) {
    let in_front = in_front.min(most.saturating_sub(1));
    let surplus = tokens.len().saturating_sub(most);
    tokens.drain(in_front..in_front + surplus);
    (tokens, in_front)
}

/// The prompt up to the end of the last message's content, without what the template writes after it. A mark that is in no text
/// shows where this end is.
fn up_to_last_message(text: &TextModel, mut chat: Chat) -> Result<String, TextError> {
    let mark = format!("\u{2063}{:032x}\u{2063}", rand::random::<u128>());
    let last = chat.messages.last_mut().ok_or(TextError::CannotContinue)?;
    let content = last["content"].as_str().unwrap_or_default();
    last["content"] = serde_json::Value::from(format!("{content}{mark}"));
    let mut rendered = text.render_chat(&chat, false)?;
    let end = rendered.rfind(&mark).ok_or(TextError::CannotContinue)?;
    rendered.truncate(end);
    Ok(rendered)
}

pub fn text_error(text: &TextModel, error: &TextError, param: &str) -> ApiError {
    match error {
        TextError::TooLong { tokens_max } => {
            let message = format!(
                "{} The prompt is too long: it has more than {tokens_max}. Shorten it.",
                context_words(text.max_model_tokens)
            );
            ApiError::too_long(param, message)
        }
        error => ApiError::invalid(param, error.to_string()),
    }
}

/// The validated requests of a plan, one per prompt.
pub fn requests(
    state: &AppState,
    plan: &CheckedRequest,
    tokenized: &Tokenized,
    labels: &RequestLabels,
) -> Result<Vec<Arc<Request>>, ApiError> {
    let Tokenized { prompts, constraint } = tokenized;
    check_prompt_logprobs(plan, prompts)?;
    // A number that the client asked for is never lowered.
    let view = state.insight.cluster.as_ref().filter(|_| plan.max_tokens.is_none());
    let decode_pools = view.map(|view| view.decode_capacities()).unwrap_or_default();
    prompts
        .iter()
        .map(|prompt| {
            let max_tokens = max_tokens(state, plan, prompt.tokens.len(), &decode_pools)?;
            Ok(Arc::new(request(state, plan, (prompt, constraint, max_tokens), labels)))
        })
        .collect()
}

/// All prompts of a request are reported in one answer.
fn check_prompt_logprobs(plan: &CheckedRequest, prompts: &[Prompt]) -> Result<(), ApiError> {
    let Some(best) = plan.prompt_logprobs() else {
        return Ok(());
    };
    let tokens: usize = prompts.iter().map(|prompt| prompt.tokens.len()).sum();
    let count = tokens.saturating_mul(best as usize + 1);
    if count <= PROMPT_LOGPROBS_MAX {
        return Ok(());
    }
    let field = match plan.fields.prompt_logprobs {
        Some(_) => "prompt_logprobs",
        None => "logprobs",
    };
    let message = format!(
        "`{field}` asks for {count} logprobs of the prompts ({tokens} tokens, each with {best} alternatives), and may ask for \
         {PROMPT_LOGPROBS_MAX}. Send fewer prompts, or ask for fewer alternatives."
    );
    Err(ApiError::invalid(field, message))
}

fn request(
    state: &AppState,
    plan: &CheckedRequest,
    (prompt, constraint, max_tokens): (&Prompt, &Arc<OutputConstraint>, u32),
    labels: &RequestLabels,
) -> Request {
    let end_tokens = state.text.codec().end_tokens();
    Request {
        id: RequestId(rand::random()),
        prompt: prompt.tokens.clone(),
        client_prompt_tokens: u32::try_from(prompt.tokens.len()).unwrap_or(u32::MAX),
        constraint: constraint.clone(),
        sampling: plan.sampling.clone(),
        stop: StopConditions {
            max_tokens,
            min_tokens: plan.min_tokens.min(max_tokens),
            end_tokens: if plan.fields.ignore_eos.0 {
                Vec::new()
            } else {
                end_tokens.to_vec()
            },
            stop_token_ids: plan.stop_token_ids.clone(),
        },
        choice_count: plan.choice_count,
        seed: plan.fields.seed.map_or_else(rand::random, |seed| seed.0),
        logprobs: plan.logprobs,
        prompt_logprobs: plan.prompt_logprobs(),
        prefix_salt: salt(plan, labels.tenant),
        cache_tenant: labels.tenant.map(TenantSalt::cache_tenant),
        report_kv_hashes: plan.fields.return_kv_hashes.0,
        lane: labels.lane,
        share: labels.share,
        priority: plan.fields.priority.map_or(0, |priority| priority.0),
        time_limit: labels.time_limit,
    }
}

/// The output budget: the client's number or the default, in both cases limited by the context, and the default by what the decode
/// nodes can hold, too.
fn max_tokens(
    state: &AppState,
    plan: &CheckedRequest,
    prompt_tokens: usize,
    decode_pools: &[NodeCapacity],
) -> Result<u32, ApiError> {
    let prompt_field = plan.endpoint.prompt_field();
    if prompt_tokens == 0 {
        let message = "The prompt has no tokens; the model needs at least one.";
        return Err(ApiError::invalid(prompt_field, message));
    }
    let limit = state.text.max_model_tokens;
    let room = u32::try_from(prompt_tokens)
        .ok()
        .and_then(|tokens| limit.checked_sub(tokens));
    let wanted = plan.max_tokens.unwrap_or(1);
    match (room.filter(|room| *room >= wanted), plan.max_tokens, plan.endpoint) {
        (Some(_), Some(asked), _) => Ok(asked),
        (Some(room), None, endpoint) => {
            let wanted = match endpoint {
                Endpoint::Completions => least_default(endpoint, plan.min_tokens).min(room),
                Endpoint::Chat | Endpoint::Responses => room,
            };
            let (least, shape) = (plan.min_tokens, (prompt_tokens, plan.choice_count));
            Ok(default_budget((least, wanted), shape, decode_pools))
        }
        (None, asked, _) => {
            let asked_words = asked.map_or(String::new(), |max| format!(", and {max} output tokens are asked for"));
            let (field, sum) = (plan.max_tokens_field, prompt_tokens as u64 + u64::from(wanted));
            let message = format!(
                "{} The prompt is too long: it has {prompt_tokens} tokens{asked_words}, {sum} together. Shorten it or lower \
                 `{field}`.",
                context_words(limit)
            );
            Err(ApiError::too_long(
                if asked.is_some() { field } else { prompt_field },
                message,
            ))
        }
    }
}

/// The client did not ask for this budget, so it must not make the request too large: it is at most what the largest pool can hold.
/// It is at least one token, so that a prompt that fits no pool is refused because of the prompt. It is also at least the minimum that
/// the client asked for; a request may be too large because of that.
fn default_budget(
    (least, wanted): (u32, u32),
    (prompt_tokens, choices): (usize, u32),
    decode_pools: &[NodeCapacity],
) -> u32 {
    let prompt_tokens = u32::try_from(prompt_tokens).unwrap_or(u32::MAX);
    let room = decode_pools
        .iter()
        .map(|pool| answer_tokens_max(prompt_tokens, choices, pool))
        .max();
    room.map_or(wanted, |room| wanted.min(room.max(least).max(1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_beyond_the_context_do_not_become_text() {
        let text = TextModel::open(&model_files::test_kit::model_path(), Some(16)).expect("the real model");
        let tokenizing = Tokenizing {
            tokens_max: 64,
            kept_max: None,
            add_special: None,
            echo: true,
            text_controls: false,
        };
        let has_text = |ids: usize| {
            let input = Input::Prompts(vec![PromptSource::Tokens(vec![TokenId(0); ids])]);
            let all = tokenizing.run(&text, input, |error| ApiError::internal(error.to_string()));
            all.expect("ids are tokens")[0].echo_text.is_some()
        };
        assert!(has_text(16));
        assert!(!has_text(17), "it is refused, and its text with it");
    }

    #[test]
    fn a_begin_token_stays_in_front_of_a_prompt_that_is_cut() {
        let tokens = || (0..5).map(TokenId).collect::<Vec<_>>();
        let ids =
            |(tokens, in_front): (Vec<TokenId>, usize)| (tokens.iter().map(|id| id.0).collect::<Vec<_>>(), in_front);
        assert_eq!(ids(cut(tokens(), 3, 1)), (vec![0, 3, 4], 1));
        assert_eq!(ids(cut(tokens(), 3, 0)), (vec![2, 3, 4], 0));
        assert_eq!(ids(cut(tokens(), 1, 1)), (vec![4], 0), "there is no room for both");
        assert_eq!(ids(cut(tokens(), 4, 1)), (vec![0, 2, 3, 4], 1));
    }

    #[test]
    fn a_prompt_that_is_cut_leaves_room_for_the_default() {
        assert_eq!(least_default(Endpoint::Completions, 0), COMPLETIONS_MAX_TOKENS_DEFAULT);
        assert_eq!(least_default(Endpoint::Completions, 40), 40);
        assert_eq!(least_default(Endpoint::Chat, 0), 1);
        assert_eq!(least_default(Endpoint::Responses, 40), 40);
    }

    #[test]
    fn a_budget_that_nobody_asked_for_fits_the_largest_pool() {
        let pool = |kv_blocks| NodeCapacity {
            kv_blocks,
            block_tokens: 16,
            max_sequences: 8,
            max_batch_tokens: 512,
            max_model_tokens: 8192,
            block_bytes: 1,
        };
        let pools = [pool(128), pool(64)];
        assert_eq!(default_budget((0, 8092), (100, 1), &pools), 128 * 16 - 100);
        assert_eq!(default_budget((0, 50), (100, 1), &pools), 50);
        // Six shared blocks, 61 for each choice, of which the prompt has four tokens.
        assert_eq!(default_budget((0, 8092), (100, 2), &pools), 61 * 16 - 4);
        assert_eq!(
            default_budget((0, 3192), (5000, 1), &pools),
            1,
            "the prompt is too large itself"
        );
        assert_eq!(default_budget((0, 8092), (100, 1), &[]), 8092, "no pool is known");
        assert_eq!(
            default_budget((5000, 8092), (100, 1), &pools),
            5000,
            "no pool holds the least"
        );
        assert_eq!(
            default_budget((9000, 8092), (100, 1), &pools),
            8092,
            "nor does the context"
        );
    }
}

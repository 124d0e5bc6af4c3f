//! Completions, chats and responses: parse, tokenize, submit, answer. All of them take this path.

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::{Extension, Request as HttpRequest, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::response::{IntoResponse, Response};
use serving_core::request::{Lane, Request};
use serving_core::stage::Stage;
use tracing::{Instrument, Span};

use super::AppState;
use super::answering::{Answering, note_end, note_finish_reasons};
use super::body::{self, Held, OwnLimit};
use super::calls::Calls;
use super::content;
use super::error::ApiError;
use super::facts::Generation;
use super::form::Form;
use super::late;
use super::metrics::InStage;
use super::pace::Pace;
use super::prepare::{Prompt, Tokenized, requests, tokenized};
use super::record::{RequestLabels, RequestRecord};
use super::reply::Reply;
use super::request::{self, CheckedRequest, Endpoint};
use super::responses::{self, ResponseReply};
use super::run::{EndsWith, OutToken, Run, RunInput};
use super::shapes::{EdgeTimes, Head};
use super::sse;
use super::trace::{self, root_span};
use super::trace_context::TraceContext;
use crate::keys::TenantSalt;
use crate::records::shape::ms;
use crate::request_handle::Submission;

const QUEUE_MS: HeaderName = HeaderName::from_static("x-queue-ms");
const SERVER_TIMING: HeaderName = HeaderName::from_static("server-timing");

pub async fn completions(
    State(state): State<Arc<AppState>>,
    Extension(record): Extension<Arc<RequestRecord>>,
    request: HttpRequest,
) -> Response {
    generate(state, record, Endpoint::Completions, request).await
}

pub async fn chat_completions(
    State(state): State<Arc<AppState>>,
    Extension(record): Extension<Arc<RequestRecord>>,
    request: HttpRequest,
) -> Response {
    generate(state, record, Endpoint::Chat, request).await
}

pub async fn responses(
    State(state): State<Arc<AppState>>,
    Extension(record): Extension<Arc<RequestRecord>>,
    request: HttpRequest,
) -> Response {
    generate(state, record, Endpoint::Responses, request).await
}

async fn generate(
    state: Arc<AppState>,
    record: Arc<RequestRecord>,
    endpoint: Endpoint,
    request: HttpRequest,
) -> Response {
    let span = root_span(endpoint, &record.request_id);
    record.facts().trace = TraceContext::of_root(&span, record.incoming_trace);
    let seq = record.insight().records.next_seq();
    let slo = state.insight.slo_rules.choose(None, None, Lane::Interactive);
    record.begin(Generation::new(span.clone(), (seq, endpoint.operation()), slo));
    let call = Call {
        state,
        record: record.clone(),
        endpoint,
        span: span.clone(),
    };
    let (parts, body) = request.into_parts();
    match call.answer(&parts.headers, body).instrument(span).await {
        Ok(response) => response,
        Err(error) => {
            record.failed(&error);
            record.told(error).into_response()
        }
    }
}

struct Call {
    state: Arc<AppState>,
    record: Arc<RequestRecord>,
    endpoint: Endpoint,
    span: Span,
}

impl Call {
    async fn answer(&self, headers: &HeaderMap, body: Body) -> Result<Response, ApiError> {
        let rules = &self.state.insight.slo_rules;
        let key = self.record.facts().key.clone();
        let mut labels = RequestLabels::new(headers, key.as_deref(), rules, self.state.limits.request_time_limit)?;
        self.record.update(|generation| generation.lane = labels.lane);
        let (mut plan, held) = self.parse(body, labels.time_limit).await?;
        // A slow upload, and the check of what came, may have used all of the time.
        self.time_left(labels.time_limit, Stage::Parse)?;
        let content = content::of_request(&self.state, &plan);
        self.record
            .update(|generation| trace::note_request(generation, plan.fields.user.as_deref(), content));
        let is_streaming = plan.fields.stream.0;
        let slo = rules.choose(labels.slo.as_ref(), Some(&plan.model), labels.lane);
        self.record.update(|generation| {
            generation.slo = slo;
            generation.is_streaming = is_streaming;
        });
        let tokenizing = self.tokenize(&mut plan, (held, labels.tenant));
        let tokenized = self.in_time(labels.time_limit, tokenizing).await?;
        labels.time_limit = self.time_left(labels.time_limit, Stage::Tokenize)?;
        let requests = requests(&self.state, &plan, &tokenized, &labels)?;
        self.describe(&plan, &requests);
        let choice_count = requests.len() * plan.choice_count as usize;
        let mut run = Run::start(&self.state, self.run_input(&plan, requests));
        self.record.update(|generation| generation.is_submitted = true);
        let pace = Pace::new(self.record.clone(), labels.lane, choice_count);
        let reply = self.reply(plan, tokenized.prompts);
        // No header is sent before the first token has come, so that a failure until then still gets its own HTTP status.
        let first = run.next().await;
        self.record.update(|generation| run.note(generation));
        let first = first?;
        let egress = tracing::info_span!(parent: &self.span, "egress", otel.kind = "internal");
        let answering = Answering {
            run,
            reply,
            pace,
            record: self.record.clone(),
            first,
            egress,
        };
        let mut response = if is_streaming {
            sse::response(answering)
        } else {
            self.whole(answering).await?
        };
        self.queue_header(&mut response);
        Ok(response)
    }

    /// Reads the body and checks JSON and fields. The stage begins with the request's first byte, so that the sum of all
    /// stages begins there.
    async fn parse(&self, body: Body, limit: Duration) -> Result<(CheckedRequest, Held), ApiError> {
        let _in_stage = InStage::new(self.state.metrics.clone(), Stage::Parse);
        let span = tracing::info_span!("parse", otel.kind = "internal");
        let place = self.record.facts().in_use.clone();
        let plan = async {
            let left = limit.saturating_sub(self.record.waited());
            let (text, held) = body::text(&self.state, body, place, Some(OwnLimit { limit, left })).await?;
            let plan = match self.endpoint {
                Endpoint::Responses => responses::parse(&self.state, &text),
                endpoint => request::parse(&self.state, endpoint, &text),
            };
            Ok((plan?, held))
        };
        let plan = plan.instrument(span).await;
        let took = self.record.received_at.elapsed();
        self.record.update(|generation| {
            generation.edge.push(Stage::Parse, took);
            generation.model = plan.as_ref().ok().map(|(plan, _)| plan.model.clone());
        });
        plan
    }

    /// A long text and a grammar wait for their turn, however many are before them. They wait no longer than the request's own limit,
    /// counted from when its head was read.
    async fn in_time<T>(
        &self,
        limit: Duration,
        work: impl Future<Output = Result<T, ApiError>>,
    ) -> Result<T, ApiError> {
        let left = limit.saturating_sub(self.record.waited());
        let done = tokio::time::timeout(left, work).await;
        done.unwrap_or_else(|_| Err(ApiError::out_of_time(Stage::Tokenize, self.record.waited())))
    }

    /// What is left of the request's limit for what follows after `stage`.
    fn time_left(&self, limit: Duration, stage: Stage) -> Result<Duration, ApiError> {
        let waited = self.record.waited();
        let left = limit.checked_sub(waited).filter(|left| !left.is_zero());
        left.ok_or_else(|| ApiError::out_of_time(stage, waited))
    }

    fn parsed_at(&self) -> Instant {
        let facts = self.record.facts();
        let parsed = facts.generation.as_ref().and_then(|g| g.edge.get(Stage::Parse));
        parsed.map_or_else(Instant::now, |took| self.record.received_at + took)
    }

    async fn tokenize(
        &self,
        plan: &mut CheckedRequest,
        (held, tenant): (Held, Option<TenantSalt>),
    ) -> Result<Tokenized, ApiError> {
        let _in_stage = InStage::new(self.state.metrics.clone(), Stage::Tokenize);
        let span = tracing::info_span!("tokenize", otel.kind = "internal");
        // The stage begins where parsing ended, so that no time lies between the two.
        let began = self.parsed_at();
        let tokenized = tokenized(&self.state, plan, (held, tenant)).instrument(span).await;
        let tokenized_at = Instant::now();
        self.record.update(|generation| {
            generation.edge.push(Stage::Tokenize, tokenized_at - began);
            generation.tokenized_at = Some(tokenized_at);
        });
        tokenized
    }

    fn describe(&self, plan: &CheckedRequest, requests: &[Arc<Request>]) {
        let prompt_tokens: u32 = requests.iter().map(|request| request.client_prompt_tokens).sum();
        self.record
            .update(|generation| generation.prompt_tokens = prompt_tokens);
        self.fingerprint(requests);
        let Some(request) = requests.first() else { return };
        let span = &self.span;
        span.record("otel.name", format!("{} {}", self.endpoint.operation(), plan.model));
        span.record("gen_ai.request.model", plan.model.as_str());
        span.record("gen_ai.response.model", plan.model.as_str());
        span.record("gen_ai.request.max_tokens", i64::from(request.stop.max_tokens));
        span.record("gen_ai.request.temperature", f64::from(request.sampling.temperature));
        span.record("gen_ai.request.top_p", f64::from(request.sampling.top_p));
        // A seed that was drawn here may need the 64th bit, which the attribute does not have.
        span.record("gen_ai.request.seed", i64::try_from(request.seed).ok());
        span.record("gen_ai.request.stream", plan.fields.stream.0);
        span.record("gen_ai.request.choice.count", i64::from(request.choice_count));
        span.record("gen_ai.request.n", i64::from(request.choice_count));
        if let Some(top_k) = request.sampling.top_k {
            span.record("gen_ai.request.top_k", i64::from(top_k));
        }
    }

    /// While somebody records the traffic, this notes which blocks the prompts share with other prompts.
    fn fingerprint(&self, requests: &[Arc<Request>]) {
        let seq = self.record.facts().generation.as_ref().map(|generation| generation.seq);
        let (book, now) = (&self.record.insight().records.prefixes, Instant::now());
        let of = |request: &Arc<Request>| book.fingerprint(seq?, &request.prompt, now);
        if let Some(prefixes) = requests.iter().map(of).collect() {
            self.record.update(|generation| generation.prefixes = prefixes);
        }
    }

    fn run_input(&self, plan: &CheckedRequest, requests: Vec<Arc<Request>>) -> RunInput {
        let (tokenized_at, traceparent) = {
            let facts = self.record.facts();
            let tokenized_at = facts.generation.as_ref().and_then(|g| g.tokenized_at);
            (tokenized_at.unwrap_or_else(Instant::now), facts.trace.to_string())
        };
        let submission = |request: &Arc<Request>| Submission {
            request: request.clone(),
            tokenized_at,
            traceparent: Some(traceparent.clone()),
        };
        let submissions = requests.iter().map(submission).collect();
        RunInput {
            requests,
            submissions,
            stop_strings: plan.fields.stop_strings().to_vec(),
            record: Some(self.record.clone()),
            ends_with: match (plan.fields.return_kv_hashes.0, plan.fields.include_metrics.0) {
                (true, _) => EndsWith::LastReports,
                (false, true) => EndsWith::Figures,
                (false, false) => EndsWith::LastToken,
            },
        }
    }

    fn reply(&self, plan: CheckedRequest, prompts: Vec<Prompt>) -> Form {
        let head = Head::new(&plan, &self.state.text.fingerprint, self.record.facts().reader());
        self.span.record("gen_ai.response.id", head.id.as_str());
        self.record
            .update(|generation| generation.response_id = Some(head.id.clone()));
        let format = self.state.text.tool_format();
        let calls = plan
            .tools
            .as_ref()
            .map(|tools| Calls::new(tools, format, plan.fields.stream.0));
        match plan.response {
            Some(_) => Form::Response(Box::new(ResponseReply::new(head, plan, calls))),
            None => Form::Choices(Box::new(Reply {
                head,
                calls,
                plan,
                echo: prompts.into_iter().map(|prompt| prompt.echo_text).collect(),
                text: self.state.text.clone(),
            })),
        }
    }

    async fn whole(&self, answering: Answering) -> Result<Response, ApiError> {
        let Answering {
            run,
            pace,
            mut reply,
            first,
            egress,
            record,
        } = answering;
        let mut counted = Counted {
            run,
            pace,
            record,
            is_noted: false,
        };
        let choice_count: usize = counted
            .run
            .prompts
            .iter()
            .map(|prompt| prompt.request.choice_count as usize)
            .sum();
        let mut tokens: Vec<Vec<OutToken>> = vec![Vec::new(); choice_count];
        let mut next = first;
        while let Some(out) = next {
            counted.pace.token(&out);
            counted.pace.asked();
            let choice = out.choice as usize;
            tokens[choice].push(out);
            next = counted.run.next().await?;
        }
        let times = counted.note();
        counted.pace.ended();
        self.record.update(|generation| {
            note_finish_reasons(generation, tokens.iter().filter_map(|steps| steps.last()));
        });
        let mut response = reply.whole(&counted.run, &tokens, &times);
        // The outcome is set last, because a panic before this line is answered with 500.
        self.record.facts().outcome = Some("ok");
        insert(&mut response, SERVER_TIMING, &server_timing(&times));
        drop(egress);
        late::answered(&self.record, &mut counted.run);
        Ok(response)
    }

    fn queue_header(&self, response: &mut Response) {
        let queued = |g: &Generation| Some(g.placement.as_ref()?.queued_for);
        if let Some(queued) = self.record.facts().generation.as_ref().and_then(queued) {
            insert(response, QUEUE_MS, &ms(queued).to_string());
        }
    }
}

/// An answer that is sent in one piece. Its handler is dropped when the client leaves: what came until then still counts.
struct Counted {
    run: Run,
    pace: Pace,
    record: Arc<RequestRecord>,
    is_noted: bool,
}

impl Counted {
    fn note(&mut self) -> EdgeTimes {
        self.is_noted = true;
        note_end(&self.record, &self.run, &mut self.pace, false)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        if !self.is_noted {
            self.note();
        }
    }
}

fn insert(response: &mut Response, name: HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        response.headers_mut().insert(name, value);
    }
}

/// The stages to the first token as a `Server-Timing` header, which browsers and curl show.
fn server_timing(times: &EdgeTimes) -> String {
    let stages = times.stages.0.iter().map(|(stage, took)| {
        let rest = if stage.is_before_first_token() { "" } else { "_rest" };
        let suffix = if stage.name() == "egress" { rest } else { "" };
        format!("{}{suffix};dur={}", stage.name(), ms(*took))
    });
    stages
        .chain([format!("total;dur={}", ms(times.e2e))])
        .collect::<Vec<_>>()
        .join(", ")
}

#[cfg(test)]
mod tests {
    use axum::http::StatusCode;
    use futures::StreamExt as _;
    use grammar::{GrammarError, Grammars};
    use serde_json::json;
    use tower::ServiceExt as _;

    use super::*;
    use crate::api::limits::COMPILED_AT_ONCE;
    use crate::api::router;
    use crate::api::tests::{PATIENCE, state};

    fn completion(time_limit_ms: &str, body: Body) -> axum::http::Request<Body> {
        axum::http::Request::post("/v1/completions")
            .header("host", "localhost")
            .header("content-type", "application/json")
            .header("x-request-timeout-ms", time_limit_ms)
            .body(body)
            .expect("a request")
    }

    fn without_vocabulary() -> AppState {
        state(Grammars::new(|| {
            Err(GrammarError::NoVocabulary("the test has none".to_owned()))
        }))
    }

    #[tokio::test]
    async fn a_request_whose_time_is_over_no_longer_waits_for_its_grammar() {
        let state = without_vocabulary();
        let places = state.compiling.clone();
        let all = u32::try_from(COMPILED_AT_ONCE).expect("a few");
        let _all = places.acquire_many(all).await.expect("places are never closed");
        let body = json!({"model": "tiny", "prompt": "hi", "guided_regex": "a+"}).to_string();
        let request = completion("50", Body::from(body));
        let answered = tokio::time::timeout(PATIENCE, router(state).oneshot(request)).await;
        let answer = answered.expect("it does not wait for ever").expect("an answer");
        assert_eq!(answer.status(), StatusCode::GATEWAY_TIMEOUT);
    }

    #[tokio::test]
    async fn an_upload_that_stands_still_ends_with_the_time_of_its_request() {
        let silent = futures::stream::pending::<Result<String, std::io::Error>>();
        let request = completion("50", Body::from_stream(silent));
        let answered = tokio::time::timeout(PATIENCE, router(without_vocabulary()).oneshot(request)).await;
        let answer = answered.expect("before the limit of all uploads").expect("an answer");
        assert_eq!(answer.status(), StatusCode::GATEWAY_TIMEOUT);
        let answer = axum::body::to_bytes(answer.into_body(), usize::MAX).await;
        let told: serde_json::Value = serde_json::from_slice(&answer.expect("its body")).expect("JSON");
        assert_eq!(told["error"]["code"], "timeout");
        let words = told["error"]["message"].as_str().expect("a text");
        assert!(words.contains("50 ms in stage parse"), "{words}");
    }

    #[tokio::test]
    async fn the_time_limit_hides_no_refusal_of_a_body() {
        let rest = futures::stream::once(async {
            tokio::time::sleep(Duration::from_millis(60)).await;
            Ok::<_, std::io::Error>(String::new())
        });
        let too_large = futures::stream::iter([Ok::<_, std::io::Error>("x".repeat(2 << 20))]);
        let request = completion("20", Body::from_stream(too_large.chain(rest)));
        let answer = router(without_vocabulary()).oneshot(request).await.expect("an answer");
        assert_eq!(answer.status(), StatusCode::PAYLOAD_TOO_LARGE);
    }

    #[tokio::test]
    async fn an_upload_that_takes_all_of_the_time_is_named() {
        let body = json!({"model": "tiny", "prompt": "hi"}).to_string();
        let slow = futures::stream::once(async move {
            tokio::time::sleep(Duration::from_millis(60)).await;
            Ok::<_, std::io::Error>(body)
        });
        let request = completion("20", Body::from_stream(slow));
        let answer = router(without_vocabulary()).oneshot(request).await.expect("an answer");
        assert_eq!(answer.status(), StatusCode::GATEWAY_TIMEOUT);
        let answer = axum::body::to_bytes(answer.into_body(), usize::MAX).await;
        let words = String::from_utf8(answer.expect("its body").to_vec()).expect("a text");
        assert!(words.contains("in stage parse"), "{words}");
    }
}

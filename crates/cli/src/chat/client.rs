//! The HTTP side of `baton chat`: one streamed question at a time.

use anyhow::{Context, bail};
use futures::StreamExt;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::timings::{Metrics, Usage};
use crate::http::{self, ListedModel, checked, unreachable};
use crate::observe::UrlArgs;
use crate::sse::SseReader;

#[derive(Clone, Debug, Serialize)]
pub struct Message {
    role: &'static str,
    content: String,
}

impl Message {
    pub fn new(role: &'static str, content: &str) -> Self {
        Self {
            role,
            content: content.to_owned(),
        }
    }
}

#[derive(Debug)]
pub struct Question<'a> {
    pub messages: &'a [Message],
    pub max_tokens: u32,
    pub temperature: Option<f64>,
    pub seed: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    Answered,
    /// Ctrl-C. The server cancels when the connection closes.
    Interrupted,
}

#[derive(Debug)]
pub struct Answer {
    pub how: Ended,
    /// Why the model stopped, in the server's word: `stop`, or `length` where --max-tokens or the context cut it.
    pub finish_reason: Option<String>,
    pub metrics: Option<Metrics>,
    pub usage: Option<Usage>,
}

/// The part of a chunk that is used here.
#[derive(Debug, Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<ChunkChoice>,
    metrics: Option<Metrics>,
    usage: Option<Usage>,
    error: Option<Value>,
}

#[derive(Debug, Deserialize)]
struct ChunkChoice {
    #[serde(default)]
    delta: Delta,
    finish_reason: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
struct Delta {
    content: Option<String>,
}

#[derive(Debug)]
pub struct ChatClient {
    http: http::Client,
    url: String,
    model: ListedModel,
}

impl ChatClient {
    /// Finds the server and its model.
    pub async fn connect(named: &UrlArgs, model: Option<String>) -> anyhow::Result<Self> {
        let url = http::base_url(&named.url);
        let http = http::client_with_key(&url, named.trust.ca())?;
        let listed = http.get(format!("{url}/v1/models")).send().await;
        let listed = listed.map_err(|error| unreachable(&url, error))?;
        let model = match model {
            None => http::first_model(listed, &url).await?,
            // A server may know names that it does not list.
            Some(name) => {
                let models = http::models(listed, &url).await.unwrap_or_default();
                let known = models.into_iter().find(|model| model.id == name);
                known.unwrap_or(ListedModel {
                    id: name,
                    parameter_count: None,
                })
            }
        };
        Ok(Self { http, url, model })
    }

    pub fn model(&self) -> &ListedModel {
        &self.model
    }

    /// Streams one answer; `show` gets each piece of text as it comes.
    pub async fn ask(
        &self,
        question: &Question<'_>,
        mut show: impl FnMut(&str) -> std::io::Result<()>,
    ) -> anyhow::Result<Answer> {
        let request = self
            .http
            .post(format!("{}/v1/chat/completions", self.url))
            .json(&self.body(question));
        let mut answer = Answer {
            how: Ended::Interrupted,
            finish_reason: None,
            metrics: None,
            usage: None,
        };
        let interrupted = tokio::signal::ctrl_c();
        tokio::pin!(interrupted);
        let response = tokio::select! {
            response = request.send() => checked(response.map_err(|error| unreachable(&self.url, error))?).await?,
            _ = &mut interrupted => return Ok(answer),
        };
        let mut bytes = response.bytes_stream();
        let mut reader = SseReader::default();
        loop {
            let piece = tokio::select! {
                piece = bytes.next() => piece,
                _ = &mut interrupted => return Ok(answer),
            };
            let Some(piece) = piece else {
                bail!("the stream ended before the answer did; the coordinator may have stopped");
            };
            for event in reader.push(&piece.context("the connection broke in the middle of the answer")?)? {
                let event = event.data;
                if event == "[DONE]" {
                    answer.how = Ended::Answered;
                    return Ok(answer);
                }
                let chunk: Chunk =
                    serde_json::from_str(&event).with_context(|| format!("an event that is no chat chunk: {event}"))?;
                if let Some(error) = chunk.error {
                    bail!(
                        "the server gave up: {}",
                        error["message"].as_str().unwrap_or("without a reason")
                    );
                }
                for choice in chunk.choices {
                    if let Some(text) = choice.delta.content.filter(|text| !text.is_empty()) {
                        show(&text)?;
                    }
                    answer.finish_reason = choice.finish_reason.or(answer.finish_reason);
                }
                answer.metrics = chunk.metrics.or(answer.metrics);
                answer.usage = chunk.usage.or(answer.usage);
            }
        }
    }

    fn body(&self, question: &Question<'_>) -> Value {
        let mut body = json!({
            "model": self.model.id,
            "messages": question.messages,
            "max_tokens": question.max_tokens,
            "stream": true,
            "stream_options": {"include_usage": true},
            "include_metrics": true,
        });
        if let Some(temperature) = question.temperature {
            body["temperature"] = json!(temperature);
        }
        if let Some(seed) = question.seed {
            body["seed"] = json!(seed);
        }
        body
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exit::Exit;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    /// Answers each connection in turn with the given bytes, then closes it.
    async fn server(answers: Vec<&'static str>) -> anyhow::Result<String> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        tokio::spawn(async move {
            for answer in answers {
                let Ok((mut socket, _)) = listener.accept().await else {
                    return;
                };
                let mut request = [0_u8; 16384];
                let _ = socket.read(&mut request).await;
                let head = "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: application/json\r\n\r\n";
                let text = if answer.starts_with("HTTP/") {
                    answer.to_owned()
                } else {
                    format!("{head}{answer}")
                };
                let _ = socket.write_all(text.as_bytes()).await;
                let _ = socket.shutdown().await;
            }
        });
        Ok(format!("http://{address}"))
    }

    const MODELS: &str = r#"{"data":[{"id":"m","parameter_count":134515008},{"id":"n"}]}"#;

    async fn ask(answer: &'static str) -> anyhow::Result<(Answer, String)> {
        let url = server(vec![MODELS, answer]).await?;
        let client = ChatClient::connect(&UrlArgs::of(&format!("{url}/v1/")), None).await?;
        assert_eq!(client.model().id, "m");
        let messages = [Message::new("user", "hi")];
        let question = Question {
            messages: &messages,
            max_tokens: 5,
            temperature: Some(0.0),
            seed: None,
        };
        let mut text = String::new();
        let answer = client
            .ask(&question, |piece| {
                text.push_str(piece);
                Ok(())
            })
            .await?;
        Ok((answer, text))
    }

    #[tokio::test]
    async fn an_answer_is_streamed_with_its_metrics() {
        let stream = "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n\
            data: {\"choices\":[{\"delta\":{\"content\":\"Par\"}}],\"usage\":null}\n\n\
            data: {\"choices\":[{\"delta\":{\"content\":\"is\"},\"finish_reason\":\"stop\"}]}\n\n\
            data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":2},\"metrics\":{\"queue_ms\":1.0}}\n\n\
            data: [DONE]\n\n";
        let (answer, text) = ask(stream).await.expect("a whole answer");
        assert_eq!((text.as_str(), answer.how), ("Paris", Ended::Answered));
        assert_eq!(answer.finish_reason.as_deref(), Some("stop"));
        assert_eq!(answer.usage.map(|usage| usage.completion_tokens), Some(2));
        assert_eq!(answer.metrics.and_then(|metrics| metrics.queue_ms), Some(1.0));
    }

    #[tokio::test]
    async fn an_error_in_the_stream_or_its_early_end_is_an_error() {
        let error = ask("data: {\"error\":{\"message\":\"decode node lost\"}}\n\n")
            .await
            .expect_err("an error event");
        assert!(error.to_string().contains("decode node lost"), "{error:#}");
        let error = ask("data: {\"choices\":[]}\n\n").await.expect_err("no [DONE]");
        assert!(error.to_string().contains("ended before"), "{error:#}");
    }

    #[tokio::test]
    async fn an_error_answer_keeps_the_servers_words() {
        let refusal =
            "HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n{\"error\":{\"message\":\"prompt too long\"}}";
        let error = ask(refusal).await.expect_err("a refusal");
        assert_eq!(error.to_string(), "400 Bad Request: prompt too long");
    }

    #[tokio::test]
    async fn no_server_is_unreachable_and_says_how_to_start_one() {
        let free = TcpListener::bind("127.0.0.1:0")
            .await
            .and_then(|l| l.local_addr())
            .expect("a free port");
        let error = ChatClient::connect(&UrlArgs::of(&format!("http://{free}")), None)
            .await
            .expect_err("nobody listens");
        assert_eq!(crate::exit::of(&error), Exit::Unreachable);
        assert!(error.to_string().contains("baton up"), "{error:#}");
    }

    #[tokio::test]
    async fn the_size_of_a_model_is_known_where_the_server_lists_it() {
        for (asked, expected) in [
            (None, Some(134_515_008)),
            (Some("m"), Some(134_515_008)),
            (Some("n"), None),
            (Some("unlisted"), None),
        ] {
            let url = server(vec![MODELS]).await.expect("a server");
            let client = ChatClient::connect(&UrlArgs::of(&url), asked.map(str::to_owned))
                .await
                .expect("connected");
            assert_eq!(client.model().id, asked.unwrap_or("m"));
            assert_eq!(client.model().parameter_count, expected, "{asked:?}");
        }
    }

    #[tokio::test]
    async fn what_is_no_url_is_a_usage_error() {
        let error = ChatClient::connect(&UrlArgs::of("not a url"), None)
            .await
            .expect_err("no URL");
        assert_eq!(crate::exit::of(&error), Exit::Usage);
    }
}

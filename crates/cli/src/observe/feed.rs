//! The stream `/admin/events`. It reconnects when the stream breaks, within limits.

use std::collections::VecDeque;
use std::pin::Pin;
use std::time::{Duration, Instant};

use anyhow::Context;
use coordinator::records::pages::ClusterPage;
use coordinator::records::shape::Summary;
use futures::{Stream, StreamExt};
use serde::Deserialize;
use serde_json::Value;

use super::client::AdminClient;
use super::records;
use crate::exit::{Exit, WithExit};
use crate::http::HttpError;
use crate::sse::{SseEvent, SseReader};

/// How often and how fast a broken stream is connected again.
#[derive(Clone, Copy, Debug)]
pub struct BackOff {
    pub first: Duration,
    pub longest: Duration,
    /// Failures in a row, without one event between them.
    pub attempts_max: u32,
}

impl BackOff {
    /// Half a minute in all: more than a coordinator's restart takes.
    pub const USUAL: Self = Self {
        first: Duration::from_millis(250),
        longest: Duration::from_secs(8),
        attempts_max: 8,
    };

    /// The pause before the n-th attempt, counted from 1.
    fn delay(self, attempt: u32) -> Duration {
        let factor = 2_u32.saturating_pow(attempt.saturating_sub(1));
        self.first.saturating_mul(factor).min(self.longest)
    }
}

/// What a reader of the stream gets.
#[derive(Debug)]
pub enum News {
    /// The record, parsed and as it came.
    Request(Box<Summary>, Value),
    Cluster(Box<ClusterPage>),
    /// The server dropped this many events because this reader did not keep up.
    Missed(u64),
    /// An event that does not follow the contract.
    Unreadable(String),
    /// The stream broke. Events until `Back` are not seen.
    Lost(String),
    Back,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Lagged {
    missed: u64,
}

type Bytes = Pin<Box<dyn Stream<Item = Result<Vec<u8>, HttpError>> + Send>>;

pub struct Feed {
    client: AdminClient,
    query: Vec<(&'static str, String)>,
    back_off: BackOff,
    open: Option<(Bytes, SseReader)>,
    opened_at: Instant,
    /// Failures since the last event. The first connection is not tried twice.
    failed_attempts: u32,
    was_lost: bool,
    /// The bytes of one read. The network's read size limits them.
    pending: VecDeque<News>,
}

impl std::fmt::Debug for Feed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Feed")
            .field("query", &self.query)
            .finish_non_exhaustive()
    }
}

impl Feed {
    /// # Errors
    /// The first connection fails.
    pub async fn connect(
        client: &AdminClient,
        query: Vec<(&'static str, String)>,
        back_off: BackOff,
    ) -> anyhow::Result<Self> {
        let mut feed = Self {
            client: client.clone(),
            query,
            back_off,
            open: None,
            opened_at: Instant::now(),
            failed_attempts: 0,
            was_lost: false,
            pending: VecDeque::new(),
        };
        feed.open().await?;
        Ok(feed)
    }

    async fn open(&mut self) -> anyhow::Result<()> {
        let response = self.client.stream(&["admin", "events"], &self.query).await?;
        let bytes = response.bytes_stream().map(|piece| piece.map(|piece| piece.to_vec()));
        self.opened_at = Instant::now();
        self.open = Some((Box::pin(bytes), SseReader::default()));
        Ok(())
    }

    /// Waits for the next event.
    ///
    /// # Errors
    /// The stream broke and could not be connected again within the limits.
    pub async fn next(&mut self) -> anyhow::Result<News> {
        loop {
            if let Some(news) = self.pending.pop_front() {
                return Ok(news);
            }
            let Some((bytes, reader)) = &mut self.open else {
                self.reconnect().await?;
                continue;
            };
            let why = match bytes.next().await {
                Some(Ok(piece)) => match reader.push(&piece) {
                    Ok(events) => {
                        if !events.is_empty() {
                            self.failed_attempts = 0;
                        }
                        self.pending.extend(events.into_iter().filter_map(news_of));
                        continue;
                    }
                    Err(error) => format!("{error:#}"),
                },
                Some(Err(error)) => format!("{:#}", anyhow::Error::new(error)),
                None => "the server closed the stream".to_owned(),
            };
            self.open = None;
            // A quiet stream that a proxy cut after minutes was a good one.
            if self.opened_at.elapsed() > self.back_off.longest {
                self.failed_attempts = 0;
            }
            if !self.was_lost {
                self.was_lost = true;
                return Ok(News::Lost(why));
            }
        }
    }

    async fn reconnect(&mut self) -> anyhow::Result<()> {
        let attempts_max = self.back_off.attempts_max;
        let given_up = || format!("the stream broke and {attempts_max} new attempts brought nothing");
        if self.failed_attempts >= attempts_max {
            return Err(anyhow::anyhow!("each new stream ended before its first event"))
                .with_context(given_up)
                .exit(Exit::Unreachable);
        }
        self.failed_attempts += 1;
        tokio::time::sleep(self.back_off.delay(self.failed_attempts)).await;
        match self.open().await {
            Ok(()) => {
                if std::mem::take(&mut self.was_lost) {
                    self.pending.push_back(News::Back);
                }
                Ok(())
            }
            Err(_) if self.failed_attempts < attempts_max => Ok(()),
            Err(error) => Err(error).with_context(given_up).exit(Exit::Unreachable),
        }
    }
}

/// Unknown kinds of events are skipped, because a newer server may send some.
fn news_of(event: SseEvent) -> Option<News> {
    let read = || -> anyhow::Result<Option<News>> {
        let data: Value = serde_json::from_str(&event.data)?;
        Ok(match event.name.as_str() {
            "request" => Some(News::Request(Box::new(records::parse(&data)?), data)),
            "cluster" => Some(News::Cluster(Box::new(records::parse(&data)?))),
            "lagged" => Some(News::Missed(records::parse::<Lagged>(&data)?.missed)),
            _ => None,
        })
    };
    read().unwrap_or_else(|error| Some(News::Unreadable(format!("event {:?}: {error:#}", event.name))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::UrlArgs;
    use crate::observe::test_kit::{Answer, TestServer};

    const QUICK: BackOff = BackOff {
        first: Duration::from_millis(1),
        longest: Duration::from_millis(4),
        attempts_max: 3,
    };

    #[test]
    fn delays_grow_up_to_their_limit() {
        let delays: Vec<u128> = (1..=40).map(|n| BackOff::USUAL.delay(n).as_millis()).collect();
        assert_eq!(&delays[..7], [250, 500, 1000, 2000, 4000, 8000, 8000]);
        assert_eq!(delays[39], 8000);
    }

    #[tokio::test]
    async fn a_broken_stream_is_connected_again_and_said() {
        let stream = |body: &str| Answer::events(body);
        let server = TestServer::start(vec![
            stream("event: request\ndata: {\"seq\":1,\"state\":\"ended\"}\n\nevent: lagged\ndata: {\"missed\":7}\n\n"),
            stream("event: request\ndata: {\"seq\":2}\n\nevent: new\ndata: {}\n\nevent: request\ndata: {\"seq\":\n\n"),
        ])
        .await;
        let client = AdminClient::new(&UrlArgs::of(&server.url)).expect("a URL");
        let mut feed = Feed::connect(&client, Vec::new(), QUICK).await.expect("connected");
        let mut told = Vec::new();
        let error = loop {
            match feed.next().await {
                Ok(News::Request(record, _)) => told.push(format!("request {}", record.seq)),
                Ok(News::Missed(count)) => told.push(format!("missed {count}")),
                Ok(News::Lost(_)) => told.push("lost".to_owned()),
                Ok(News::Back) => told.push("back".to_owned()),
                Ok(News::Unreadable(_)) => told.push("unreadable".to_owned()),
                Ok(News::Cluster(_)) => told.push("cluster".to_owned()),
                Err(error) => break error,
            }
        };
        let expected = [
            "request 1",
            "missed 7",
            "lost",
            "back",
            "request 2",
            "unreadable",
            "lost",
        ];
        assert_eq!(told, expected);
        assert_eq!(crate::exit::of(&error), Exit::Unreachable, "{error:#}");
    }
}

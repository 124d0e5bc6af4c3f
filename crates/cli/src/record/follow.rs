//! Follows the coordinator's records in the order in which they end, and counts what is left out.

use std::time::Duration;

use anyhow::Context;
use coordinator::records::shape::Summary;
use coordinator::records::{Page, prefixes};
use serving_core::request::Lane;
use workload::recording::Recorded;

use crate::observe::client::AdminClient;

/// Of a fingerprint, and so of the trace.
pub(super) const BLOCK_TOKENS: u32 = prefixes::BLOCK_TOKENS as u32;
/// Records on a page: the coordinator's limit.
const PAGE: &str = "1000";
/// The numbers of records begin anew with each life of a coordinator. This is the room of one life.
const SEQS_OF_A_LIFE: u32 = 48;

/// Requests that are not in the trace, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct LeftOut {
    pub missed: u64,
    pub early: u64,
    pub unanswered: u64,
    pub running: u64,
    /// Not requests: how often the coordinator had forgotten the recording.
    pub restarts: u64,
}

#[derive(Debug)]
pub(super) struct Follower<'a> {
    client: &'a AdminClient,
    /// Number of the next record to end.
    cursor: u64,
    recording: String,
    /// On the coordinator's wall clock.
    from_unix_ms: f64,
    until_unix_ms: f64,
    now_unix_ms: f64,
    recorded: Vec<Recorded>,
    left_out: LeftOut,
}

impl<'a> Follower<'a> {
    /// # Errors
    /// Nobody answers, or the coordinator is of a version that makes no recordings.
    pub async fn start(client: &'a AdminClient) -> anyhow::Result<Self> {
        let page = ended_from(client, u64::MAX).await?;
        let (cursor, prefixes) = page
            .next_ended_from
            .zip(page.prefixes)
            .context("this coordinator makes no recordings: it is older than this program (`baton version`)")?;
        anyhow::ensure!(
            prefixes.block_tokens == BLOCK_TOKENS,
            "the coordinator records blocks of {} tokens and this program knows {BLOCK_TOKENS}: use one version of baton",
            prefixes.block_tokens
        );
        Ok(Self {
            client,
            cursor,
            recording: prefixes.recording,
            from_unix_ms: page.now_unix_ms,
            until_unix_ms: f64::INFINITY,
            now_unix_ms: page.now_unix_ms,
            recorded: Vec::new(),
            left_out: LeftOut::default(),
        })
    }

    pub fn len(&self) -> usize {
        self.recorded.len()
    }

    /// Requests that come from now on are not recorded.
    pub fn stop(&mut self) {
        self.until_unix_ms = self.now_unix_ms;
    }

    /// Reads all records that have ended since the last time.
    ///
    /// # Errors
    /// Nobody answers, or the answer is no page of records.
    pub async fn catch_up(&mut self) -> anyhow::Result<()> {
        loop {
            let page = ended_from(self.client, self.cursor).await?;
            let all = page.forgotten.saturating_add(page.kept as u64);
            if self.take(page) >= all {
                return Ok(());
            }
        }
    }

    /// Returns the number of the next record to end.
    fn take(&mut self, page: Page) -> u64 {
        let prefixes = page.prefixes.unwrap_or_default();
        self.now_unix_ms = page.now_unix_ms;
        if prefixes.recording != self.recording {
            self.recording = prefixes.recording;
            self.left_out.restarts += 1;
            // Another process has counted from 0 again.
            if page.forgotten.saturating_add(page.kept as u64) < self.cursor {
                self.cursor = 0;
                return 0;
            }
        }
        self.left_out.missed += page.forgotten.saturating_sub(self.cursor);
        self.cursor = page.next_ended_from.unwrap_or(self.cursor);
        let life = self.left_out.restarts << SEQS_OF_A_LIFE;
        for summary in &page.records {
            let prompts = prefixes.requests.get(&summary.seq).map_or(&[][..], Vec::as_slice);
            let is_within = (self.from_unix_ms..=self.until_unix_ms).contains(&summary.received_unix_ms);
            if summary.serving.output_tokens == 0 {
                self.left_out.unanswered += u64::from(is_within);
            } else if !is_within || prompts.is_empty() {
                self.left_out.early += 1;
            } else {
                self.recorded.extend(prompts_of(summary, prompts, life));
            }
        }
        self.cursor
    }

    /// Whether a request runs that belongs to the recording. Reads what has ended, too.
    ///
    /// # Errors
    /// As [`Self::catch_up`].
    pub async fn are_some_running(&mut self) -> anyhow::Result<bool> {
        let query = [("running", "true".to_owned()), ("limit", PAGE.to_owned())];
        let page: Page = self.client.read(&["admin", "requests"], &query).await?;
        let came_before = |summary: &&Summary| summary.received_unix_ms <= self.until_unix_ms;
        self.left_out.running = page.records.iter().filter(came_before).count() as u64;
        self.catch_up().await?;
        Ok(self.left_out.running > 0)
    }

    pub fn finish(self) -> (Vec<Recorded>, LeftOut) {
        (self.recorded, self.left_out)
    }
}

async fn ended_from(client: &AdminClient, cursor: u64) -> anyhow::Result<Page> {
    let query = [
        ("ended_from", cursor.to_string()),
        ("prefixes", "true".to_owned()),
        ("limit", PAGE.to_owned()),
    ];
    client.read(&["admin", "requests"], &query).await
}

/// One entry for each prompt. The record has the output tokens of all prompts together; they are divided evenly.
fn prompts_of(summary: &Summary, prompts: &[prefixes::PrefixShape], life: u64) -> Vec<Recorded> {
    let count = u32::try_from(prompts.len()).unwrap_or(u32::MAX).max(1);
    let time = |ms: f64| Duration::try_from_secs_f64(ms / 1e3).unwrap_or_default();
    let lane = Lane::ALL.into_iter().find(|lane| lane.name() == summary.lane);
    let received = time(summary.received_unix_ms);
    let one = |prompt: &prefixes::PrefixShape| Recorded {
        seq: life.saturating_add(summary.seq),
        received,
        ended: received.saturating_add(time(summary.e2e_ms)),
        lane: lane.unwrap_or(Lane::Interactive),
        prompt_tokens: prompt.prompt_tokens,
        output_tokens: (summary.serving.output_tokens / count).max(1),
        blocks: prompt.blocks.clone(),
        continues: prompt.continues.map(|seq| life.saturating_add(seq)),
    };
    prompts.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::UrlArgs;
    use crate::observe::test_kit::{Answer, TestServer, nobody};

    fn page(text: &str) -> Page {
        serde_json::from_str(text).expect("a page")
    }

    fn record(seq: u64, (received, output_tokens): (u32, u32)) -> String {
        format!(
            "{{\"seq\":{seq},\"received_unix_ms\":{received},\"e2e_ms\":500,\"lane\":\"batch\",\"state\":\"ended\",\
             \"output_tokens\":{output_tokens}}}"
        )
    }

    fn prompts(blocks: &str) -> String {
        format!("[{{\"prompt_tokens\":20,\"blocks\":{blocks},\"continues\":1}}]")
    }

    #[tokio::test]
    async fn each_end_is_read_once_and_what_is_left_out_is_counted() {
        let begin =
            r#"{"next_ended_from":5,"now_unix_ms":1000,"kept":5,"prefixes":{"block_tokens":16,"recording":"a"}}"#;
        let server = TestServer::start(vec![Answer::json("/admin/requests", begin)]).await;
        let client = AdminClient::new(&UrlArgs::of(&server.url)).expect("a URL");
        let mut follower = Follower::start(&client).await.expect("started");
        let asked = server.asked();
        assert!(asked[0].contains("ended_from=18446744073709551615"), "{asked:?}");
        // Numbers 5 and 6 were dropped. One request had begun before, one got no token, one has no fingerprint.
        let records = [
            record(8, (2000, 9)),
            record(9, (999, 9)),
            record(10, (2000, 0)),
            record(11, (2000, 9)),
        ];
        let text = format!(
            "{{\"records\":[{}],\"kept\":4,\"forgotten\":7,\"now_unix_ms\":3000,\"next_ended_from\":11,\
             \"prefixes\":{{\"block_tokens\":16,\"recording\":\"a\",\"requests\":{{\"8\":{},\"11\":[]}}}}}}",
            records.join(","),
            prompts("[3,4]")
        );
        assert_eq!(follower.take(page(&text)), 11);
        let (recorded, left_out) = follower.finish();
        assert_eq!(recorded.len(), 1);
        assert_eq!(
            (recorded[0].seq, recorded[0].output_tokens, recorded[0].lane),
            (8, 9, Lane::Batch)
        );
        assert_eq!(recorded[0].ended, Duration::from_millis(2500));
        assert_eq!(
            (recorded[0].blocks.as_slice(), recorded[0].continues),
            (&[3, 4][..], Some(1))
        );
        let expected = LeftOut {
            missed: 2,
            early: 2,
            unanswered: 1,
            ..LeftOut::default()
        };
        assert_eq!(left_out, expected);
    }

    #[tokio::test]
    async fn a_coordinator_that_starts_anew_is_read_from_its_beginning() {
        let begin =
            r#"{"next_ended_from":5,"now_unix_ms":1000,"kept":5,"prefixes":{"block_tokens":16,"recording":"a"}}"#;
        let server = TestServer::start(vec![Answer::json("/admin/requests", begin)]).await;
        let client = AdminClient::new(&UrlArgs::of(&server.url)).expect("a URL");
        let mut follower = Follower::start(&client).await.expect("started");
        let anew = |requests: &str, records: &str| {
            page(&format!(
                "{{\"records\":[{records}],\"kept\":1,\"forgotten\":0,\"now_unix_ms\":3000,\"next_ended_from\":1,\
                 \"prefixes\":{{\"block_tokens\":16,\"recording\":\"b\",\"requests\":{{{requests}}}}}}}"
            ))
        };
        assert_eq!(follower.take(anew("", "")), 0, "the page was for another life");
        assert_eq!(
            follower.take(anew(&format!("\"1\":{}", prompts("[7]")), &record(1, (2000, 9)))),
            1
        );
        let (recorded, left_out) = follower.finish();
        assert_eq!((left_out.restarts, left_out.missed), (1, 0));
        assert_eq!(
            recorded[0].seq,
            (1 << SEQS_OF_A_LIFE) + 1,
            "no number of the earlier life"
        );
    }

    #[tokio::test]
    async fn an_older_coordinator_and_no_coordinator_are_said() {
        let server = TestServer::start(vec![Answer::json("/admin/requests", "{\"records\":[]}")]).await;
        let client = AdminClient::new(&UrlArgs::of(&server.url)).expect("a URL");
        let error = Follower::start(&client).await.expect_err("too old");
        assert!(format!("{error:#}").contains("older"), "{error:#}");
        let client = AdminClient::new(&UrlArgs::of(&nobody().await)).expect("a URL");
        let error = Follower::start(&client).await.expect_err("nobody");
        assert_eq!(crate::exit::of(&error), crate::exit::Exit::Unreachable);
    }
}

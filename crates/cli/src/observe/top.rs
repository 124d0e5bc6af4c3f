//! `baton top`: the cluster on one screen, drawn again each second. Without a terminal it prints one frame.

mod frame;
mod screen;
mod state;
mod watch;

use std::time::{Duration, Instant};

use clap::Args;
use tokio::time::MissedTickBehavior;

use super::client::AdminClient;
use super::feed::BackOff;
use super::look::{Look, stdout_size};
use super::{UrlArgs, json};
use crate::exit::Exit;
use crate::stdout::print;
use screen::Screen;
use state::State;
use watch::{Update, Watch, raw_pages, read_pages};

const EXAMPLES: &str = "\
Examples:
  baton top                             nodes, latencies of the last minute, running requests; q quits
  baton top --url http://10.0.0.5:8000
  baton top | cat                       one frame, for a log
  baton top --json | jq .running        the pages behind one frame: cluster, running and ended requests";

const DRAW_EVERY: Duration = Duration::from_secs(1);
/// The most lines of a frame that goes to a file or a pipe.
const ROWS_PIPED: usize = 60;

#[derive(Debug, Args)]
#[command(before_help = EXAMPLES)]
pub struct TopArgs {
    #[command(flatten)]
    pub url: UrlArgs,
    /// Bars of ASCII characters only (as with TERM=dumb).
    #[arg(long)]
    pub ascii: bool,
    /// Print the pages behind one frame as one JSON object.
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &TopArgs) -> anyhow::Result<Exit> {
    let is_live = stdout_size().is_some() && !crate::terminal::is_dumb();
    super::run_until_signal(async {
        let client = AdminClient::new(&args.url)?;
        if args.json {
            print(&json(&raw_pages(&client).await?)?)?;
            Ok(Exit::Ok)
        } else if is_live {
            live(&client, args.ascii).await
        } else {
            once(&client, Look::stdout(args.ascii), print).await
        }
    })
}

async fn once(
    client: &AdminClient,
    look: Look,
    mut show: impl FnMut(&str) -> anyhow::Result<()>,
) -> anyhow::Result<Exit> {
    let mut state = State::new(Instant::now());
    state.apply(Update::Pages(Box::new(read_pages(client).await?)), Instant::now());
    let lines = frame::lines(&state, client.base(), (Instant::now(), ROWS_PIPED), look);
    show(
        &lines
            .iter()
            .map(|line| format!("{}\n", line.trim_end()))
            .collect::<String>(),
    )?;
    Ok(Exit::Ok)
}

async fn live(client: &AdminClient, is_ascii: bool) -> anyhow::Result<Exit> {
    // Errors until here are printed on the usual screen.
    let mut watch = Watch::start(client, BackOff::USUAL).await?;
    let mut screen = Screen::enter()?;
    let mut state = State::new(Instant::now());
    let mut ticks = tokio::time::interval(DRAW_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            update = watch.next() => {
                let is_first = state.is_empty();
                state.apply(update?, Instant::now());
                // A busy cluster sends hundreds of events a second. The first one is drawn at once, the others wait for the
                // clock.
                if !is_first {
                    continue;
                }
            }
            key = screen.key() => match key {
                b'q' | b'Q' => return Ok(Exit::Ok),
                _ => continue,
            },
            _ = ticks.tick() => {}
        }
        let (columns, rows) = screen.size();
        let look = Look {
            width: columns,
            ..Look::stdout(is_ascii)
        };
        screen.draw(&frame::lines(&state, client.base(), (Instant::now(), rows), look))?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::test_kit::{Answer, TestServer, nobody};

    #[tokio::test]
    async fn without_a_terminal_it_is_one_frame() {
        let server = TestServer::start(vec![
            Answer::json("/admin/cluster", include_str!("../../testdata/cluster.json")),
            Answer::json(
                "/admin/requests?running=true",
                r#"{"records":[{"seq":5,"state":"streaming"}]}"#,
            ),
            Answer::json("/admin/requests?running=false", r#"{"records":[]}"#),
        ])
        .await;
        let client = AdminClient::new(&UrlArgs::of(&server.url)).expect("a URL");
        let mut shown = String::new();
        let ended = once(&client, Look::plain(100), |text| {
            shown.push_str(text);
            Ok(())
        });
        assert_eq!(ended.await.expect("a frame"), Exit::Ok);
        assert!(shown.contains("decode-0") && shown.contains("streaming"), "{shown}");
        let server = TestServer::start(vec![
            Answer::json("/admin/cluster", r#"{"nodes":[]}"#),
            Answer::json("/admin/requests?running=true", r#"{"records":[{"seq":5}]}"#),
            Answer::json("/admin/requests?running=false", r#"{"records":[]}"#),
        ])
        .await;
        let pages = raw_pages(&AdminClient::new(&UrlArgs::of(&server.url)).expect("a URL")).await;
        let expected = serde_json::json!({"cluster": {"nodes": []}, "running": [{"seq": 5}], "ended": []});
        assert_eq!(pages.expect("pages"), expected);
        let client = AdminClient::new(&UrlArgs::of(&nobody().await)).expect("a URL");
        let error = once(&client, Look::plain(100), |_| Ok(())).await.expect_err("nobody");
        assert_eq!(crate::exit::of(&error), Exit::Unreachable);
    }
}

//! `baton chat`: one question or a conversation in the terminal, with the timings of each answer.

mod client;
mod timings;

use std::borrow::Cow;
use std::io::{IsTerminal, Read, Write};

use anyhow::Context;
use clap::Args;
use serde::Serialize;

use crate::exit::{ErrorForm, Exit, WithExit};
use crate::http::ListedModel;
use crate::observe::UrlArgs;
use crate::observe::format::clean;
use crate::stdout::is_reader_gone;
use crate::terminal::{Terminal, say};
use client::{Answer, ChatClient, Ended, Message, Question};
use timings::{Metrics, Timings, Usage};

/// The most text that is piped in as one question. A longer text is refused, not cut.
const PIPED_BYTES_MAX: u64 = 1 << 20;
/// Models with fewer parameters answer simple questions wrongly so often that whoever tries baton with one should be told:
/// the model of `baton up` has 135 million.
const SMALL_BELOW_PARAMETERS: u64 = 1_000_000_000;

const EXAMPLES: &str = "\
Examples:
  baton chat                                            a conversation; Ctrl-D ends it
  baton chat Name the capital of France.
  git diff | baton chat --system 'Explain this change'
  baton chat --json Name three rivers | jq -r .answer
  baton chat --url http://10.0.0.5:8000 --temperature 0 hello";

#[derive(Debug, Args)]
#[command(before_help = EXAMPLES)]
pub struct ChatArgs {
    /// Ask this and exit. Without it: a conversation, or what is piped in.
    #[arg(value_name = "PROMPT")]
    pub prompt: Vec<String>,
    #[command(flatten)]
    pub url: UrlArgs,
    /// Instructions in front of the conversation.
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Longest answer.
    #[arg(long, default_value_t = 512, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_tokens: u32,
    /// 0 always takes the likeliest token; small models ramble at 1.
    #[arg(long, value_name = "NUMBER", default_value_t = 0.2)]
    pub temperature: f64,
    /// Repeats the same draws at a temperature above 0.
    #[arg(long, value_name = "NUMBER")]
    pub seed: Option<u64>,
    /// The model's name [default: the first one the server lists].
    #[arg(long, value_name = "NAME")]
    pub model: Option<String>,
    /// No timings after each answer.
    #[arg(long)]
    pub no_timings: bool,
    /// Print one JSON object when the answer has ended: model, answer, is_whole, finish_reason, usage, metrics. It needs a prompt.
    #[arg(long)]
    pub json: bool,
}

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct AnswerPage<'a> {
    model: &'a str,
    answer: &'a str,
    /// False: Ctrl-C ended it.
    is_whole: bool,
    /// `stop`; `length`: --max-tokens or the context cut the answer. Null: it did not end.
    finish_reason: Option<&'a str>,
    /// Null: the server sent none.
    usage: Option<&'a Usage>,
    metrics: Option<&'a Metrics>,
}

pub fn run(args: ChatArgs) -> anyhow::Result<Exit> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    let outcome = runtime.block_on(chat(&args));
    // A blocked read of the terminal must not delay the exit.
    runtime.shutdown_background();
    outcome
}

/// `None` for a model that is large enough, or whose size the server does not tell.
fn words_about_a_small_model(model: &ListedModel) -> Option<String> {
    let count = model.parameter_count.filter(|count| *count < SMALL_BELOW_PARAMETERS)?;
    Some(format!(
        "{} has {} million parameters: answers of a model this small are often wrong",
        clean(&model.id),
        count.div_ceil(1_000_000)
    ))
}

/// A model may repeat what it was given to read. On a terminal no control character of it reaches the screen; a pipe gets all.
fn shown(text: &str, is_terminal: bool) -> Cow<'_, str> {
    let is_control = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    match is_terminal && text.contains(is_control) {
        true => text.chars().map(|c| if is_control(c) { '?' } else { c }).collect(),
        false => text.into(),
    }
}

/// What is piped in, as one question.
///
/// # Errors
/// It cannot be read, is too long, is no text, or asks nothing.
fn piped_question(input: impl Read) -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    let mut input = input.take(PIPED_BYTES_MAX + 1);
    input.read_to_end(&mut bytes).context("stdin cannot be read")?;
    // Asked before the text is read, because the limit may cut it within a character.
    anyhow::ensure!(
        bytes.len() as u64 <= PIPED_BYTES_MAX,
        "stdin holds more than {PIPED_BYTES_MAX} bytes, the most that one question may have"
    );
    let piped = String::from_utf8(bytes).context("stdin is not UTF-8 text")?;
    anyhow::ensure!(
        !piped.trim().is_empty(),
        "nothing to ask: give a prompt, or pipe one in"
    );
    Ok(piped)
}

/// Whether a conversation cannot go on after this failure: the server is gone, or nobody reads the answers.
fn ends_conversation(error: &anyhow::Error) -> bool {
    crate::exit::of(error) == Exit::Unreachable || is_reader_gone(error)
}

async fn chat(args: &ChatArgs) -> anyhow::Result<Exit> {
    let has_question = !args.prompt.is_empty() || !std::io::stdin().is_terminal();
    if args.json && !has_question {
        return Err(anyhow::anyhow!(
            "--json answers one question: give a prompt, or pipe one in"
        ))
        .exit(Exit::Usage);
    }
    let client = ChatClient::connect(&args.url, args.model.clone()).await?;
    let is_read_by_a_person = !args.json && std::io::stdout().is_terminal() && std::io::stderr().is_terminal();
    if let Some(words) = words_about_a_small_model(client.model()).filter(|_| is_read_by_a_person) {
        say!("{}", Terminal::stderr().dim(&words));
    }
    let mut chat = Chat {
        args,
        client,
        terminal: Terminal::stderr(),
        messages: Vec::new(),
    };
    chat.clear();
    if !args.prompt.is_empty() {
        return chat.ask_once(args.prompt.join(" ")).await;
    }
    if !std::io::stdin().is_terminal() {
        let piped = piped_question(std::io::stdin().lock())?;
        return chat.ask_once(piped).await;
    }
    chat.converse().await
}

struct Chat<'a> {
    args: &'a ChatArgs,
    client: ChatClient,
    terminal: Terminal,
    messages: Vec<Message>,
}

impl Chat<'_> {
    fn clear(&mut self) {
        let system = self.args.system.iter().map(|text| Message::new("system", text));
        self.messages = system.collect();
    }

    async fn ask_once(&mut self, prompt: String) -> anyhow::Result<Exit> {
        match self.ask(prompt).await? {
            Ended::Answered => Ok(Exit::Ok),
            Ended::Interrupted => Ok(Exit::Interrupted),
        }
    }

    async fn converse(&mut self) -> anyhow::Result<Exit> {
        let hint = "Ctrl-C stops an answer, Ctrl-D ends the conversation, /clear forgets it";
        let model = clean(&self.client.model().id);
        let words = format!("{model} at {}; {hint}", self.args.url.url);
        say!("{}", self.terminal.dim(&words));
        loop {
            let _ = write!(std::io::stderr().lock(), "{}", self.terminal.bold("> "));
            let line = tokio::task::spawn_blocking(|| {
                let mut line = String::new();
                std::io::stdin()
                    .read_line(&mut line)
                    .map(|bytes| (bytes > 0).then_some(line))
            });
            let line = tokio::select! {
                line = line => line.context("the reader of the terminal stopped")?.context("cannot read the terminal")?,
                interrupted = tokio::signal::ctrl_c() => {
                    interrupted.context("cannot listen for Ctrl-C")?;
                    say!("");
                    return Ok(Exit::Interrupted);
                }
            };
            match line.as_deref().map(str::trim) {
                None => {
                    say!("");
                    return Ok(Exit::Ok);
                }
                Some("") => {}
                Some("/clear") => self.clear(),
                Some("/exit" | "/quit") => return Ok(Exit::Ok),
                Some(prompt) => {
                    let prompt = prompt.to_owned();
                    // A refused or failed question does not end the conversation.
                    if let Err(error) = self.ask(prompt).await {
                        if ends_conversation(&error) {
                            return Err(error);
                        }
                        self.messages.pop();
                        say!("{}", ErrorForm::Text.line(&error));
                    }
                }
            }
        }
    }

    /// Streams one answer to stdout and its timings to stderr; with `--json` all of it is one object at its end.
    async fn ask(&mut self, prompt: String) -> anyhow::Result<Ended> {
        self.messages.push(Message::new("user", &prompt));
        let question = Question {
            messages: &self.messages,
            max_tokens: self.args.max_tokens,
            temperature: Some(self.args.temperature),
            seed: self.args.seed,
        };
        let mut timings = Timings::start();
        let mut answer = String::new();
        let is_streamed = !self.args.json;
        let is_terminal = std::io::stdout().is_terminal();
        let ended = {
            let mut out = crate::stdout::stdout();
            let show = |text: &str| {
                timings.on_text();
                answer.push_str(text);
                match is_streamed {
                    true => out
                        .write_all(shown(text, is_terminal).as_bytes())
                        .and_then(|()| out.flush()),
                    false => Ok(()),
                }
            };
            self.client.ask(&question, show).await?
        };
        if self.args.json {
            let page = page(&self.client.model().id, &answer, &ended);
            crate::stdout::print_result(&format!("{}\n", serde_json::to_string(&page)?))?;
            return Ok(ended.how);
        }
        crate::stdout::print("\n")?;
        self.messages.push(Message::new("assistant", &answer));
        if !self.args.no_timings {
            let line = timings.line(ended.metrics.as_ref(), ended.usage.as_ref());
            say!("{}", self.terminal.dim(&line));
        }
        if ended.finish_reason.as_deref() == Some("length") {
            let words = "The answer was cut: --max-tokens sets how long it may be.";
            say!("{}", self.terminal.dim(words));
        }
        Ok(ended.how)
    }
}

fn page<'a>(model: &'a str, answer: &'a str, ended: &'a Answer) -> AnswerPage<'a> {
    AnswerPage {
        model,
        answer,
        is_whole: ended.how == Ended::Answered,
        finish_reason: ended.finish_reason.as_deref(),
        usage: ended.usage.as_ref(),
        metrics: ended.metrics.as_ref(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_model_that_is_known_to_be_small_is_warned_of() {
        let words = |parameter_count| {
            words_about_a_small_model(&ListedModel {
                id: "m".to_owned(),
                parameter_count,
            })
        };
        assert!(words(Some(134_515_008)).is_some_and(|words| words.contains("135 million")));
        assert_eq!(words(Some(SMALL_BELOW_PARAMETERS)), None);
        assert_eq!(words(None), None);
    }

    #[test]
    fn a_piped_text_that_is_too_long_is_told_from_one_that_is_no_text() {
        let most = "a".repeat(1 << 20);
        assert_eq!(piped_question(most.as_bytes()).expect("it fits"), most);
        // The limit stands within the character.
        let error = piped_question(format!("{most}é").as_bytes()).expect_err("too long");
        assert!(error.to_string().contains(&PIPED_BYTES_MAX.to_string()), "{error:#}");
        let error = piped_question(&b"\xff"[..]).expect_err("no text");
        assert!(error.to_string().contains("UTF-8"), "{error:#}");
        assert!(piped_question(&b" \n"[..]).is_err());
    }

    #[test]
    fn a_conversation_ends_with_its_server_or_its_reader_and_not_with_a_refusal() {
        let unread = write!(crate::stdout::test_kit::unread(), "x").expect_err("nobody reads");
        assert!(ends_conversation(&unread.into()));
        let away: anyhow::Result<()> = Err(anyhow::anyhow!("no server answers"));
        assert!(ends_conversation(&away.exit(Exit::Unreachable).expect_err("away")));
        assert!(!ends_conversation(&anyhow::anyhow!("400 Bad Request: prompt too long")));
    }

    #[test]
    fn a_terminal_gets_no_control_character_of_an_answer_and_a_pipe_all() {
        let answer = "a\x1b]52;c;x\x07\tb\n";
        assert_eq!(shown(answer, true), "a?]52;c;x?\tb\n");
        assert_eq!(shown(answer, false), answer);
    }

    #[test]
    fn the_json_of_an_answer_has_every_key_whatever_the_server_sent() {
        let bare = Answer {
            how: Ended::Interrupted,
            finish_reason: None,
            metrics: None,
            usage: None,
        };
        let json = serde_json::to_value(page("m", "Par", &bare)).expect("plain data");
        let expected = serde_json::json!({
            "model": "m", "answer": "Par", "is_whole": false, "finish_reason": null, "usage": null, "metrics": null
        });
        assert_eq!(json, expected);
    }
}

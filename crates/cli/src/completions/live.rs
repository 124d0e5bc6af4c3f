//! The hidden verb that completion scripts call: which names fit where the cursor is. It asks the coordinator, or looks at the local
//! cluster.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Arg, Args, Command};
use coordinator::records::Page;
use coordinator::records::pages::ClusterPage;

use crate::exit::Exit;
use crate::http::{self, TrustArgs};
use crate::logs;
use crate::observe::client::AdminClient;
use crate::observe::{UrlArgs, run_until_signal};
use crate::stdout::print_result;

/// Somebody waits with a finger on the key.
const ANSWER_WITHIN: Duration = Duration::from_secs(1);
/// More would fill the screen.
const REQUESTS_MAX: usize = 20;

#[derive(Debug, Args)]
pub struct LiveArgs {
    /// The command line up to the cursor.
    #[arg(value_name = "LINE", allow_hyphen_values = true)]
    line: String,
}

/// Prints one name a line. A server that does not answer has no names: nothing may disturb the line that is typed.
pub(crate) fn run(args: &LiveArgs, command: &Command) -> anyhow::Result<Exit> {
    let Some(wanted) = Wanted::of(command, &args.line) else {
        return Ok(Exit::Ok);
    };
    run_until_signal(async {
        let names = tokio::time::timeout(ANSWER_WITHIN, names(&wanted)).await;
        let names = names.ok().and_then(Result::ok).unwrap_or_default();
        let fitting = names
            .iter()
            .filter(|name| is_plain(name) && name.starts_with(&wanted.begin));
        print_result(&fitting.map(|name| format!("{name}\n")).collect::<String>())?;
        Ok(Exit::Ok)
    })
}

/// What no shell expands. Ids of requests come from clients.
fn is_plain(name: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    !name.is_empty() && !name.starts_with('-') && name.bytes().all(is_allowed)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Node,
    Request,
    Process,
}

impl Kind {
    /// By the name that the help gives to the value.
    fn of(arg: &Arg) -> Option<Self> {
        match arg.get_value_names()?.first()?.as_str() {
            "NODE" => Some(Self::Node),
            "ID|last" => Some(Self::Request),
            "PROCESS" => Some(Self::Process),
            _ => None,
        }
    }
}

/// What the cursor asks for.
#[derive(Debug, PartialEq, Eq)]
struct Wanted {
    kind: Kind,
    /// What is typed of it.
    begin: String,
    /// The server that the line names.
    url: Option<String>,
}

impl Wanted {
    /// `None`: no name of a cluster is wanted here. Quotes in the line are not understood; no such name needs them.
    fn of(command: &Command, line: &str) -> Option<Self> {
        let mut words: Vec<&str> = line.split_whitespace().collect();
        let begin = match line.ends_with(char::is_whitespace) {
            true => "",
            false => words.pop()?,
        };
        let mut words = words.into_iter().skip(1).peekable();
        let mut verb = command;
        while let Some(inner) = words.peek().and_then(|word| verb.find_subcommand(word)) {
            verb = inner;
            words.next();
        }
        let (mut positional_count, mut url) = (0, None);
        // The flag whose value comes next.
        let mut open: Option<&Arg> = None;
        for word in words {
            let (flag, value) = match open.take() {
                Some(flag) => (Some(flag), Some(word)),
                None if word.starts_with('-') => match word.split_once('=') {
                    Some((name, value)) => (flag_of(verb, name), Some(value)),
                    None => (flag_of(verb, word), None),
                },
                None => {
                    positional_count += 1;
                    continue;
                }
            };
            match value {
                Some(value) if flag.is_some_and(|flag| flag.get_long() == Some("url")) => url = Some(value.to_owned()),
                Some(_) => {}
                None => open = flag,
            }
        }
        let arg = match open {
            Some(flag) => flag,
            None if begin.starts_with('-') => return None,
            None => verb.get_positionals().nth(positional_count)?,
        };
        Some(Self {
            kind: Kind::of(arg)?,
            begin: begin.to_owned(),
            url,
        })
    }
}

/// The flag of this name, if it takes a value.
fn flag_of<'a>(verb: &'a Command, word: &str) -> Option<&'a Arg> {
    let long = word.strip_prefix("--");
    let short = word.strip_prefix('-').and_then(|name| name.chars().next());
    let is_it = |arg: &&Arg| match long {
        Some(long) => arg.get_long() == Some(long),
        None => short.is_some() && arg.get_short() == short,
    };
    let flag = verb.get_arguments().find(is_it);
    flag.filter(|flag| flag.get_action().takes_values())
}

async fn names(wanted: &Wanted) -> anyhow::Result<Vec<String>> {
    let variable = std::env::var(http::URL_VARIABLE).ok();
    let url = wanted.url.clone().or(variable.filter(|url| !url.is_empty()));
    if wanted.kind == Kind::Process {
        return Ok(logs::known_processes(url.as_deref()));
    }
    let ca = std::env::var_os(http::tls::CA_VARIABLE).map(PathBuf::from);
    let client = AdminClient::new(&UrlArgs {
        url: url.unwrap_or_else(|| http::URL_DEFAULT.to_owned()),
        trust: TrustArgs::new(ca),
    })?;
    if wanted.kind == Kind::Node {
        let cluster: ClusterPage = client.read(&["admin", "cluster"], &[]).await?;
        return Ok(cluster.nodes.into_iter().map(|node| node.name).collect());
    }
    let query = [("running", "false".to_owned()), ("limit", REQUESTS_MAX.to_string())];
    let page: Page = client.read(&["admin", "requests"], &query).await?;
    let newest = page.records.into_iter().map(|record| record.id);
    Ok(std::iter::once("last".to_owned()).chain(newest).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Cli;
    use crate::observe::test_kit::{Answer, TestServer, nobody};
    use clap::CommandFactory;

    fn wanted(line: &str) -> Option<(Kind, String, Option<String>)> {
        let wanted = Wanted::of(&Cli::command(), line)?;
        Some((wanted.kind, wanted.begin, wanted.url))
    }

    #[test]
    fn the_place_of_the_cursor_says_which_names_are_wanted() {
        let plain = |kind, begin: &str| Some((kind, begin.to_owned(), None));
        assert_eq!(wanted("baton drain "), plain(Kind::Node, ""));
        assert_eq!(wanted("baton drain deco"), plain(Kind::Node, "deco"));
        assert_eq!(wanted("baton drain --wait 0 --force d"), plain(Kind::Node, "d"));
        assert_eq!(wanted("baton role p"), plain(Kind::Node, "p"));
        assert_eq!(wanted("baton tap --node "), plain(Kind::Node, ""));
        assert_eq!(wanted("baton trace --all 4"), plain(Kind::Request, "4"));
        assert_eq!(wanted("baton logs -n 5 -f "), plain(Kind::Process, ""));
        let at = |kind| Some((kind, String::new(), Some("http://h:1".to_owned())));
        assert_eq!(wanted("baton drain --url http://h:1 "), at(Kind::Node));
        assert_eq!(wanted("baton trace --url=http://h:1 "), at(Kind::Request));
        for other in [
            "",
            "baton",
            "baton ",
            "baton drain",
            "baton drain decode-0 ",
            "baton drain --w",
            "baton drain --wait ",
            "baton role prefill-1 de",
            "baton nodes ",
            "baton tap ",
            "baton no-such-verb x",
        ] {
            assert_eq!(wanted(other), None, "{other:?}");
        }
    }

    #[test]
    fn only_names_that_no_shell_expands_are_offered() {
        assert!(is_plain("decode-0.rack_1"));
        for name in ["", "a b", "$(x)", "`x`", "-x", "a;b", "a*", "ä"] {
            assert!(!is_plain(name), "{name}");
        }
    }

    #[tokio::test]
    async fn names_come_from_the_server_that_the_line_names() {
        let server = TestServer::start(vec![
            Answer::json(
                "/admin/cluster",
                r#"{"nodes":[{"name":"prefill-0"},{"name":"decode-0"}]}"#,
            ),
            Answer::json("/admin/requests", r#"{"records":[{"seq":9,"id":"r-9"}]}"#),
        ])
        .await;
        let asked = |kind, url: &str| Wanted {
            kind,
            begin: String::new(),
            url: Some(url.to_owned()),
        };
        let nodes = names(&asked(Kind::Node, &server.url)).await;
        assert_eq!(nodes.expect("a page"), ["prefill-0", "decode-0"]);
        let requests = names(&asked(Kind::Request, &server.url)).await;
        assert_eq!(requests.expect("a page"), ["last", "r-9"]);
        assert!(names(&asked(Kind::Node, &nobody().await)).await.is_err());
    }
}

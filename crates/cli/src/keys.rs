//! `baton keys`: makes, lists and revokes the API keys of clients. It changes the file that `--api-keys` of the coordinator
//! names, so it runs where that file is.

use std::io::{self, Write};
use std::num::NonZeroU32;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use coordinator::keys::file::{ClientKey, KeyFile, KeyName, Limits, Scope};
use coordinator::keys::secret::{KeyHash, SecretKey};
use serde_json::json;
use serving_core::request::Lane;

use crate::exit::{Exit, WithExit as _};
use crate::observe::table::{Cell, Table};
use crate::terminal::{Terminal, say};

const EXAMPLES: &str = "\
Examples:
  baton keys create laptop                                 a key for generation, printed once
  baton keys create ops --scope admin,metrics,inference    a key for everything: console, status, drain
  baton keys create nightly --lane batch --weight 2        waits behind the interactive lane, with twice a key's part of its own
  baton keys create trial --requests-per-minute 60 --tokens-per-minute 20000 --concurrent-requests 2
  baton up --api-keys keys.toml                            asks every client for a key
  BATON_API_KEY=baton-.. baton status                      baton's own verbs send this one
  baton keys revoke laptop                                 refused within a second, also by running coordinators";

#[derive(Debug, Args)]
#[command(before_help = EXAMPLES)]
pub struct KeysArgs {
    #[command(subcommand)]
    pub verb: KeysVerb,
}

#[derive(Debug, Subcommand)]
pub enum KeysVerb {
    /// Make a key and print it. It is shown this once: the file has only its hash.
    Create(CreateArgs),
    /// List the keys with what they may do.
    List(ListArgs),
    /// Take a key out of the file. Requests that run go on to their end.
    Revoke(RevokeArgs),
}

#[derive(Debug, Args)]
pub struct FileArgs {
    /// The file of keys, which `--api-keys` of a coordinator or of `baton up` names.
    #[arg(long, default_value = "keys.toml", value_name = "FILE")]
    pub file: PathBuf,
}

#[derive(Debug, Args)]
pub struct CreateArgs {
    /// Who gets the key. The access log has this name with each request.
    #[arg(value_name = "NAME")]
    pub name: KeyName,
    /// What its holder may ask for.
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "inference",
        value_name = "SCOPE,.."
    )]
    pub scope: Vec<Scope>,
    /// Keys of one tenant share cached prompts [default: none, so that the key shares them with no other].
    #[arg(long, value_name = "TENANT")]
    pub tenant: Option<KeyName>,
    /// The only lane in which its requests may wait [default: each request says which].
    #[arg(long, value_name = "LANE", value_parser = lane)]
    pub lane: Option<Lane>,
    /// How many times the tokens of a key of weight 1 it gets while others wait, too [default: 1].
    #[arg(long, value_name = "N")]
    pub weight: Option<NonZeroU32>,
    /// Requests a minute; five seconds' worth may come at once [default: no limit].
    #[arg(long, value_name = "N")]
    pub requests_per_minute: Option<NonZeroU32>,
    /// Tokens of prompts and answers a minute [default: no limit].
    #[arg(long, value_name = "N")]
    pub tokens_per_minute: Option<NonZeroU32>,
    /// Requests that are open at once [default: no limit].
    #[arg(long, value_name = "N")]
    pub concurrent_requests: Option<NonZeroU32>,
    #[command(flatten)]
    pub file: FileArgs,
    /// Print one JSON object, name and key, instead of the key.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct ListArgs {
    #[command(flatten)]
    pub file: FileArgs,
    /// One JSON array instead of a table.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct RevokeArgs {
    /// Whose key.
    #[arg(value_name = "NAME")]
    pub name: KeyName,
    #[command(flatten)]
    pub file: FileArgs,
}

pub fn run(args: &KeysArgs) -> anyhow::Result<Exit> {
    match &args.verb {
        KeysVerb::Create(args) => create(args),
        KeysVerb::List(args) => list(args),
        KeysVerb::Revoke(args) => revoke(args),
    }
}

fn create(args: &CreateArgs) -> anyhow::Result<Exit> {
    create_to(args, &mut crate::stdout::stdout())
}

fn create_to(args: &CreateArgs, out: &mut impl Write) -> anyhow::Result<Exit> {
    let (file, name) = (&args.file.file, &args.name);
    let secret = SecretKey::random();
    let hash = KeyHash::of(secret.text());
    KeyFile::change(file, |keys| {
        if keys.keys.iter().any(|key| key.name == *name) {
            let error = anyhow::anyhow!(
                "{} has a key called {name} already: revoke it, or choose another name",
                file.display()
            );
            return Err(error).exit(Exit::Usage);
        }
        keys.keys.push(ClientKey {
            name: name.clone(),
            sha256: hash,
            scopes: args.scope.iter().copied().collect(),
            tenant: args.tenant.clone(),
            lane: args.lane,
            weight: args.weight,
            limits: Limits {
                requests_per_minute: args.requests_per_minute,
                tokens_per_minute: args.tokens_per_minute,
                concurrent_requests: args.concurrent_requests,
            },
        });
        Ok(())
    })?;
    let line = match args.json {
        true => json!({"name": name.as_str(), "key": secret.text()}).to_string(),
        false => secret.text().to_owned(),
    };
    if let Err(error) = writeln!(out, "{line}").and_then(|()| out.flush()) {
        return Err(unseen(args, hash, &error));
    }
    say!(
        "the key of {name} is in {} as a hash only: keep the line above, it is shown this once",
        file.display()
    );
    Ok(Exit::Ok)
}

/// Nobody can have seen a key that could not be printed, so it does not stay in the file. The cause is in the words alone: a reader of stdout
/// that has gone would end the verb with status 0.
fn unseen(args: &CreateArgs, hash: KeyHash, error: &io::Error) -> anyhow::Error {
    let (file, name, hash) = (&args.file.file, &args.name, hash.to_string());
    let removed = KeyFile::change(file, |keys| {
        keys.keys.retain(|key| key.sha256.to_string() != hash);
        anyhow::Ok(())
    });
    let file = file.display();
    match removed {
        Ok(()) => anyhow::anyhow!(
            "the key of {name} could not be printed ({error}), so it is not in {file} any more: make it again where stdout takes it"
        ),
        Err(kept) => anyhow::anyhow!(
            "the key of {name} could not be printed ({error}), and it is still in {file} ({kept:#}): take it out with `baton keys revoke {name} --file {file}`"
        ),
    }
}

fn list(args: &ListArgs) -> anyhow::Result<Exit> {
    let keys = KeyFile::load(&args.file.file)?.keys;
    let mut out = crate::stdout::stdout();
    if args.json {
        let listed: Vec<_> = keys.iter().map(page).collect();
        writeln!(out, "{}", serde_json::to_string(&listed)?)?;
        return Ok(Exit::Ok);
    }
    if keys.is_empty() {
        say!("{} has no key: baton keys create NAME", args.file.file.display());
        return Ok(Exit::Ok);
    }
    let mut table = Table::new(&[
        "name",
        "tenant",
        "scopes",
        "lane",
        ">weight",
        ">requests/min",
        ">tokens/min",
        ">open at once",
    ]);
    for key in &keys {
        let limit = |limit: Option<NonZeroU32>| Cell::new(limit.map_or("-".to_owned(), |limit| limit.to_string()));
        table.row(vec![
            Cell::new(key.name.as_str()),
            Cell::new(tenant(key).unwrap_or("-")),
            Cell::new(scopes(key).join(",")),
            Cell::new(key.lane.map_or("-", Lane::name)),
            Cell::new(weight(key).to_string()),
            limit(key.limits.requests_per_minute),
            limit(key.limits.tokens_per_minute),
            limit(key.limits.concurrent_requests),
        ]);
    }
    out.write_all(table.render(Terminal::stdout()).as_bytes())?;
    Ok(Exit::Ok)
}

fn tenant(key: &ClientKey) -> Option<&str> {
    key.tenant.as_ref().map(KeyName::as_str)
}

fn weight(key: &ClientKey) -> NonZeroU32 {
    key.weight.unwrap_or(NonZeroU32::MIN)
}

fn lane(name: &str) -> Result<Lane, String> {
    let found = Lane::ALL.into_iter().find(|lane| lane.name() == name);
    found.ok_or_else(|| "a lane is interactive or batch".to_owned())
}

fn scopes(key: &ClientKey) -> Vec<&'static str> {
    key.scopes.iter().map(|scope| scope.name()).collect()
}

fn page(key: &ClientKey) -> serde_json::Value {
    json!({
        "name": key.name.as_str(),
        "tenant": tenant(key),
        "scopes": scopes(key),
        "lane": key.lane.map(Lane::name),
        "weight": weight(key),
        "requests_per_minute": key.limits.requests_per_minute,
        "tokens_per_minute": key.limits.tokens_per_minute,
        "concurrent_requests": key.limits.concurrent_requests,
    })
}

fn revoke(args: &RevokeArgs) -> anyhow::Result<Exit> {
    let (file, name) = (&args.file.file, &args.name);
    KeyFile::change(file, |keys| {
        let before = keys.keys.len();
        keys.keys.retain(|key| key.name != *name);
        match keys.keys.len() < before {
            true => Ok(()),
            false => Err(anyhow::anyhow!(
                "{} has no key called {name}; `baton keys list` shows those that are there",
                file.display()
            ))
            .exit(Exit::Usage),
        }
    })?;
    say!(
        "{name} is revoked: coordinators that read {} refuse it within a second",
        file.display()
    );
    Ok(Exit::Ok)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(file: &std::path::Path, name: &str) -> CreateArgs {
        CreateArgs {
            name: name.parse().expect("a name"),
            scope: vec![Scope::Inference, Scope::Metrics],
            tenant: None,
            lane: Some(Lane::Batch),
            weight: None,
            requests_per_minute: NonZeroU32::new(60),
            tokens_per_minute: None,
            concurrent_requests: None,
            file: FileArgs { file: file.to_owned() },
            json: true,
        }
    }

    fn created(file: &std::path::Path, name: &str) -> anyhow::Result<Exit> {
        create(&arguments(file, name))
    }

    #[test]
    fn a_key_that_could_not_be_printed_does_not_stay_in_the_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("keys.toml");
        created(&file, "a").expect("is made");
        let names = || -> Vec<String> {
            let keys = KeyFile::load(&file).expect("is read").keys;
            keys.iter().map(|key| key.name.as_str().to_owned()).collect()
        };
        let unread = create_to(&arguments(&file, "b"), &mut crate::stdout::test_kit::unread());
        assert_eq!(
            crate::exit::report(unread, crate::exit::ErrorForm::Text),
            Exit::Failure.into()
        );
        assert_eq!(names(), ["a"]);
        created(&file, "b").expect("the name is free");
        assert_eq!(names(), ["a", "b"]);
    }

    #[test]
    fn a_key_is_made_once_and_revoked_once() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("keys.toml");
        created(&file, "a").expect("is made");
        created(&file, "b").expect("is made");
        let twice = created(&file, "a").expect_err("there is one");
        assert_eq!(crate::exit::of(&twice), Exit::Usage);
        let keys = KeyFile::load(&file).expect("is read").keys;
        let names: Vec<_> = keys.iter().map(|key| key.name.as_str()).collect();
        assert_eq!(names, ["a", "b"]);
        assert_eq!(scopes(&keys[0]), ["inference", "metrics"]);
        let page = page(&keys[0]);
        assert_eq!(
            (&page["requests_per_minute"], &page["weight"], &page["lane"]),
            (&60.into(), &1.into(), &"batch".into())
        );
        let args = RevokeArgs {
            name: "a".parse().expect("a name"),
            file: FileArgs { file },
        };
        revoke(&args).expect("is revoked");
        let again = revoke(&args).expect_err("is not there");
        assert_eq!(crate::exit::of(&again), Exit::Usage);
        assert_eq!(KeyFile::load(&args.file.file).expect("is read").keys.len(), 1);
    }
}

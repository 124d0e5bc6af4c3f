//! A comparison of clusters that run already: the load alternates between them, and what they have is declared.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, ensure};
use serde_json::json;
use tokio_util::sync::CancellationToken;
use workload::comparison::{Arm, ArmKind};

use super::args::{CompareArgs, NamedUrl};
use super::budget::{Counts, Deadline, TimePlan};
use super::facts::{ArmFacts, DECLARED, Facts};
use super::fairness::Conduct;
use super::finish::{Finished, finish};
use super::measure::{Manner, Offered, ShapePlan, measure};
use super::progress::Shown;
use super::runner::{Place, Runner, Target, WARM_UP_REQUESTS};
use super::sender::Placement;
use super::traffic::{TYPICAL, Traffic};
use crate::bench::load::environment::without_login;
use crate::exit::{Exit, WithExit};
use crate::http::base_url;
use crate::terminal::say;

pub(super) async fn compare(args: &CompareArgs, stop: CancellationToken) -> anyhow::Result<Exit> {
    let path = args.facts.as_deref().context("--arm needs --facts")?;
    let facts = Facts::read(path)?;
    let (arms, targets) = arms(args, &facts)?;
    ensure_usage(arms.len() > 1, "a comparison needs two arms: give --arm NAME=URL twice")?;
    ensure_usage(
        !args.rates.is_empty(),
        "give the loads with --rates, in requests a second: this program does not search the knee of a cluster that others may use",
    )?;
    let traffic = args.traffic()?;
    let counts = Counts {
        measured: (traffic.len() * args.rates.len() * arms.len()) as u32 * args.repeats,
        ..Counts::default()
    };
    let time = TimePlan::new(counts, args.run_max(), args.limit()).exit(Exit::Usage)?;
    say!("baton compare: {} deployed clusters\n{}", arms.len(), time.text());
    if args.plan_only {
        return Ok(Exit::Ok);
    }
    let mut runner = Runner {
        machine: None,
        model: args.model.clone(),
        api_key: args.api_key.clone(),
        ca: args.trust.ca().map(Path::to_path_buf),
        deadline: Deadline::start(time.limit),
        stop: stop.clone(),
        placement: Placement::default(),
        shown: Shown::new(counts.measured),
    };
    let manner = Manner {
        repeats: args.repeats,
        length: time.lengths.measured,
        request_timeout: std::time::Duration::from_secs(60),
        seed: args.seed,
        has_new_prompts_each_round: true,
        planned: time.total(),
    };
    let shapes = shapes(args, &traffic, manner)?;
    let measured = measure(&mut runner, &targets, &shapes, manner).await;
    runner.shown.end();
    let finished = Finished {
        measured: measured?,
        conduct: conduct(args, &facts, &runner, manner),
        arms,
        streams: traffic
            .iter()
            .filter(|one| one.has_streams())
            .map(|one| one.name.clone())
            .collect(),
        environment: BTreeMap::from([
            ("plan".to_owned(), json!(time.text())),
            ("resources".to_owned(), json!(DECLARED)),
        ]),
        took: runner.deadline.elapsed(),
    };
    finish(args, finished, &stop, &mut crate::stdout::stdout())
}

fn ensure_usage(holds: bool, words: &'static str) -> anyhow::Result<()> {
    let check = || -> anyhow::Result<()> {
        ensure!(holds, words);
        Ok(())
    };
    check().exit(Exit::Usage)
}

fn arms(args: &CompareArgs, facts: &Facts) -> anyhow::Result<(Vec<Arm>, Vec<Target>)> {
    let (mut arms, mut targets): (Vec<Arm>, Vec<Target>) = (Vec::new(), Vec::new());
    for given in &args.arm {
        ensure_usage(
            arms.iter().all(|arm| arm.name != given.name),
            "two arms have the same name; each --arm NAME=URL needs its own",
        )?;
        let is_here = |other: &&NamedUrl| base_url(&other.url) == base_url(&given.url);
        ensure_usage(
            args.arm.iter().filter(is_here).count() == 1,
            "two arms have the same address, whose caches would know the prompts of the first arm when the second one sends them; an A/A \
             comparison needs two equal clusters",
        )?;
        let own = facts.arm(&given.name)?;
        let mut settings = own.settings.clone();
        let shown = without_login(&given.url);
        settings.insert("url".to_owned(), json!(shown));
        settings.insert("resources".to_owned(), json!(DECLARED));
        arms.push(Arm {
            name: given.name.clone(),
            kind: ArmKind::External,
            topology: own.topology.clone().unwrap_or(shown),
            settings,
            resources: own.resources(),
            tuning: Vec::new(),
        });
        targets.push(Target {
            name: given.name.clone(),
            place: Place::There { url: given.url.clone() },
        });
    }
    Ok((arms, targets))
}

fn shapes(args: &CompareArgs, traffic: &[Traffic], manner: Manner) -> anyhow::Result<Vec<ShapePlan>> {
    let shape = |traffic: &Traffic| -> anyhow::Result<ShapePlan> {
        let loads = args.rates.iter().map(|rate| {
            Ok(Offered {
                label: format!("{rate} requests/s"),
                trace: traffic.trace(*rate, manner.length, args.seed, &TYPICAL)?,
            })
        });
        Ok(ShapePlan {
            name: traffic.name.clone(),
            traffic: traffic.words(&TYPICAL),
            loads: loads.collect::<anyhow::Result<_>>()?,
        })
    };
    traffic.iter().map(shape).collect()
}

fn conduct(args: &CompareArgs, facts: &Facts, runner: &Runner, manner: Manner) -> Conduct {
    let declared = |words: &Option<String>| words.as_ref().map(|words| format!("{words} ({DECLARED})"));
    let tuned: Option<Vec<String>> = args
        .arm
        .iter()
        .map(|arm| {
            let facts: &ArmFacts = facts.arms.get(&arm.name)?;
            Some(format!("{}: {}", arm.name, facts.tuned.as_ref()?))
        })
        .collect();
    let client = facts
        .client_placement
        .as_ref()
        .map(|words| format!("{words}; {}", runner.placement.words()));
    Conduct {
        has_fresh_processes: false,
        incomplete: None,
        tuned: tuned.map(|words| format!("{} ({DECLARED})", words.join("; "))),
        same_edge: declared(&facts.same_edge),
        seed: args.seed,
        client_placement: declared(&client),
        warm_up_requests: WARM_UP_REQUESTS,
        warm_up: manner.warm_up(),
        cool_down: manner.cool_down(),
        pool_utilisation: declared(&facts.pool_utilisation),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: CompareArgs,
    }

    fn arms_at(urls: [&str; 2]) -> anyhow::Result<(Vec<Arm>, Vec<Target>)> {
        let own = ArmFacts {
            topology: None,
            cores: 1,
            gpus: 0,
            memory: "1GiB".to_owned(),
            price_per_hour: None,
            tuned: None,
            settings: BTreeMap::new(),
        };
        let facts = Facts {
            arms: ["a", "b"].map(|name| (name.to_owned(), own.clone())).into(),
            ..Facts::default()
        };
        let [a, b] = [format!("a={}", urls[0]), format!("b={}", urls[1])];
        let words = ["compare", "--facts", "facts.toml", "--arm", &a, "--arm", &b];
        arms(&Line::try_parse_from(words).expect("usable words").args, &facts)
    }

    #[test]
    fn two_arms_at_one_address_are_refused() {
        assert_eq!(arms_at(["http://h:1", "http://h:2"]).expect("two clusters").0.len(), 2);
        for same in [["http://h:1", "http://h:1"], ["http://h:1", "http://h:1/v1/"]] {
            let error = arms_at(same).expect_err("one cluster");
            assert_eq!(crate::exit::of(&error), Exit::Usage, "{same:?}");
        }
    }

    #[test]
    fn the_report_has_no_password_of_an_address() {
        let (arms, targets) = arms_at(["http://u:secret@h:1", "http://h:2"]).expect("two clusters");
        assert_eq!(
            (arms[0].settings["url"].as_str(), &*arms[0].topology),
            (Some("http://***@h:1"), "http://***@h:1")
        );
        assert!(!format!("{arms:?}").contains("secret"));
        assert_eq!(targets.len(), 2);
    }
}

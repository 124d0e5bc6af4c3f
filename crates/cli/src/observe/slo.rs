//! `baton slo`: how much of the error budget is left, how fast it burns, and which stage takes more than its share.

use anyhow::bail;
use clap::Args;
use coordinator::records::pages::{LaneBudget, SloPage, StageBudget};

use super::client::{AdminClient, parse};
use super::format::{clean, ms, ms_or_dash};
use super::look::Look;
use super::table::{Cell, Table};
use super::{Output, OutputArgs, UrlArgs, json};
use crate::exit::{Exit, WithExit};
use crate::stdout::print_result;
use crate::terminal::{Paint, Terminal, say};

const EXAMPLES: &str = "\
Examples:
  baton slo                             every profile: good of total, burn, budget left
  baton slo --profile chat --budget     where the time of a request goes, against each stage's budget
  baton slo || echo 'stop the rollout'  exit status 3 when a budget is spent";

/// A percentile of fewer requests says little.
const SAMPLES_MIN: usize = 100;

#[derive(Debug, Args)]
#[command(before_help = EXAMPLES)]
pub struct SloArgs {
    /// Only this profile.
    #[arg(long, value_name = "PROFILE")]
    pub profile: Option<String>,
    /// The budget of each stage against its 99th percentile, those over it first.
    #[arg(long)]
    pub budget: bool,
    #[command(flatten)]
    pub url: UrlArgs,
    #[command(flatten)]
    pub output: OutputArgs,
}

fn is_spent(lane: &LaneBudget) -> bool {
    lane.budget_left.is_some_and(|left| left <= 0.0)
}

/// The part of the budget that is used. More than 1 is over the budget.
fn used(stage: &StageBudget) -> Option<f64> {
    match (stage.p99_ms, stage.budget_ms) {
        (Some(p99), Some(budget)) if budget > 0.0 => Some(p99 / budget),
        _ => None,
    }
}

pub fn run(args: &SloArgs) -> anyhow::Result<Exit> {
    super::run_until_signal(slo(args, print_result))
}

async fn slo(args: &SloArgs, mut show: impl FnMut(&str) -> anyhow::Result<()>) -> anyhow::Result<Exit> {
    let client = AdminClient::new(&args.url)?;
    let path = ["admin", "slo"];
    let raw = client.page(&path, &[]).await?;
    let mut page: SloPage = parse(&path, &raw)?;
    if let Some(wanted) = &args.profile {
        let names: Vec<String> = page.profiles.iter().map(|profile| clean(&profile.name)).collect();
        page.profiles.retain(|profile| profile.name == *wanted);
        if page.profiles.is_empty() {
            let known = names.join(", ");
            return Err(anyhow::anyhow!("there is no profile `{wanted}`; there are: {known}")).exit(Exit::Usage);
        }
    }
    let terminal = Look::stdout(false).terminal;
    match (args.output.format(), args.budget) {
        // The page as it came. The exit status is still that of the chosen profile.
        (Output::Json, _) => show(&json(&raw)?)?,
        (Output::Table, false) => show(&profiles_table(&page, terminal))?,
        (Output::Table, true) if page.stages.is_empty() => bail!("the server has no stage budgets"),
        (Output::Table, true) => show(&stages_table(&page.stages, terminal))?,
    }
    let spent: Vec<String> = page
        .profiles
        .iter()
        .flat_map(|profile| profile.lanes.iter().map(move |lane| (profile, lane)))
        .filter(|(_, lane)| is_spent(lane))
        .map(|(profile, lane)| spent_words(&profile.name, lane))
        .collect();
    for words in &spent {
        say!("{}", clean(words));
    }
    Ok(if spent.is_empty() { Exit::Ok } else { Exit::NotMet })
}

fn spent_words(profile: &str, lane: &LaneBudget) -> String {
    let worst = lane.breaches.iter().max_by_key(|(_, count)| **count);
    let kinds = worst.map_or_else(String::new, |(kind, count)| format!(", most of them {kind} ({count})"));
    format!(
        "the budget of {profile} for {} is spent: {} of {} requests were not good{kinds}; \
         baton tap --breached shows them as they come, baton slo --budget which stage is slow",
        lane.lane,
        lane.total.saturating_sub(lane.good),
        lane.total
    )
}

fn profiles_table(page: &SloPage, terminal: Terminal) -> String {
    let mut table = Table::new(&[
        "profile",
        "lane",
        ">TTFT ms max",
        ">ITL ms max",
        ">good",
        ">total",
        ">burn 5m",
        ">burn 1h",
        ">budget left",
        "breaches",
    ]);
    let times = |burn: Option<f64>| burn.map_or_else(|| "-".to_owned(), |burn| format!("{burn:.1}x"));
    for profile in &page.profiles {
        for lane in &profile.lanes {
            let left = lane.budget_left.map(|left| format!("{:.0}%", left * 100.0));
            let left = Cell::new(left.unwrap_or_else(|| "-".to_owned()));
            let breaches = lane.breaches.iter().filter(|(_, count)| **count > 0);
            let breaches: Vec<String> = breaches.map(|(kind, count)| format!("{kind} {count}")).collect();
            table.row(vec![
                Cell::new(&profile.name),
                Cell::new(&lane.lane),
                ms_or_dash(profile.ttft_ms_max).into(),
                ms_or_dash(profile.itl_ms_max).into(),
                lane.good.to_string().into(),
                lane.total.to_string().into(),
                times(lane.burn_5m).into(),
                times(lane.burn_1h).into(),
                if is_spent(lane) { left.paint(Paint::Bad) } else { left },
                breaches.join(", ").into(),
            ]);
        }
    }
    let mut text = if table.is_empty() {
        "no request has been judged yet\n".to_owned()
    } else {
        table.render(terminal)
    };
    if let Some(objective) = page.objective {
        text.push_str(&format!(
            "objective {} good; burn 1x spends the budget of {} exactly\n",
            percent(objective),
            percent(1.0 - objective)
        ));
    }
    text
}

/// `99.95%`: as many digits as an objective has. A product of floats may have more of them.
fn percent(share: f64) -> String {
    let digits = format!("{:.4}", share * 100.0);
    format!("{}%", digits.trim_end_matches('0').trim_end_matches('.'))
}

/// First those over their budget, then in the order of the part that they use.
fn stages_table(stages: &[StageBudget], terminal: Terminal) -> String {
    let mut sorted: Vec<&StageBudget> = stages.iter().collect();
    sorted.sort_by(|a, b| {
        let order = |stage: &StageBudget| used(stage).unwrap_or(-1.0);
        order(b).total_cmp(&order(a))
    });
    let mut table = Table::new(&["stage", ">budget ms", ">p99 ms", ">of budget", ">n", ""]);
    for stage in sorted {
        let is_over = used(stage).is_some_and(|used| used > 1.0);
        let is_few = stage.count < SAMPLES_MIN;
        let paint = match (is_over, is_few) {
            (true, _) => Paint::Bad,
            (false, true) => Paint::Dim,
            (false, false) => Paint::None,
        };
        let mut words: Vec<String> = Vec::new();
        if let (true, Some(p99), Some(budget)) = (is_over, stage.p99_ms, stage.budget_ms) {
            words.push(format!("over by {} ms", ms(p99 - budget)));
        }
        if is_few {
            words.push(format!("fewer than {SAMPLES_MIN} samples"));
        }
        let share = used(stage).map(|used| format!("{:.0}%", used * 100.0));
        let cells = [
            stage.stage.to_string(),
            ms_or_dash(stage.budget_ms),
            ms_or_dash(stage.p99_ms),
            share.unwrap_or_else(|| "-".to_owned()),
            stage.count.to_string(),
            words.join(", "),
        ];
        table.row(cells.iter().map(|cell| Cell::new(cell).paint(paint)).collect());
    }
    table.render(terminal)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::records;
    use crate::observe::test_kit::{Answer, TestServer, bent};

    const PAGE: &str = include_str!("../../testdata/slo.json");

    fn page() -> SloPage {
        records::parse(&serde_json::from_str(PAGE).expect("JSON")).expect("fits")
    }

    async fn slo_of(body: &str, profile: Option<&str>) -> (String, anyhow::Result<Exit>) {
        let server = TestServer::start(vec![Answer::json("/admin/slo", body)]).await;
        let args = SloArgs {
            profile: profile.map(str::to_owned),
            budget: false,
            url: UrlArgs::of(&server.url),
            output: OutputArgs::default(),
        };
        let mut shown = String::new();
        let ended = slo(&args, |text| {
            shown.push_str(text);
            Ok(())
        });
        let ended = ended.await;
        (shown, ended)
    }

    #[tokio::test]
    async fn a_spent_budget_is_status_3_and_only_of_the_chosen_profile() {
        assert_eq!(slo_of(PAGE, None).await.1.expect("a page"), Exit::NotMet);
        assert_eq!(slo_of(PAGE, Some("chat")).await.1.expect("a page"), Exit::Ok);
        let (shown, ended) = slo_of(PAGE, Some("async-batch")).await;
        assert_eq!(ended.expect("a page"), Exit::NotMet);
        assert!(
            shown.contains("async-batch") && !shown.contains("interactive"),
            "{shown}"
        );
        let error = slo_of(PAGE, Some("nope")).await.1.expect_err("unknown");
        assert_eq!(crate::exit::of(&error), Exit::Usage);
        assert!(error.to_string().contains("async-batch"), "{error:#}");
        assert_eq!(slo_of("{}", None).await.1.expect("an empty page"), Exit::Ok);
    }

    #[test]
    fn an_objective_has_the_digits_that_it_was_given_with() {
        let said = |objective| {
            let page = SloPage {
                objective: Some(objective),
                ..page()
            };
            profiles_table(&page, Terminal::plain())
        };
        for (objective, good, allowed) in [
            (0.56, " 56% ", " 44% "),
            (0.9999, " 99.99% ", " 0.01% "),
            (0.9, " 90% ", " 10% "),
        ] {
            let text = said(objective);
            assert!(text.contains(good) && text.contains(allowed), "{text}");
        }
    }

    #[test]
    fn stages_over_their_budget_come_first_and_say_by_how_much() {
        let text = stages_table(&page().stages, Terminal::plain());
        let rows: Vec<&str> = text
            .lines()
            .skip(1)
            .map(|line| line.split(' ').next().unwrap_or(""))
            .collect();
        assert_eq!(rows, ["prefill_forward", "queue", "route", "mystery"], "{text}");
        let over: Vec<&str> = text.lines().filter(|line| line.contains("over by")).collect();
        assert!(over.len() == 1 && over[0].contains("20.0"), "{text}");
        let coloured = stages_table(&page().stages, Terminal::coloured());
        assert!(coloured.contains("\x1b[31mprefill_forward"), "{coloured:?}");
    }

    #[test]
    fn bent_pages_do_not_panic() {
        let pages = bent(PAGE).filter_map(|page| records::parse::<SloPage>(&page).ok());
        let draw =
            |page: SloPage| profiles_table(&page, Terminal::plain()) + &stages_table(&page.stages, Terminal::plain());
        assert!(pages.map(draw).filter(|text| !text.contains('\x1b')).count() > 100);
    }
}

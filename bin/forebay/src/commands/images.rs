//! `create`, `ls`, `info`, `resize`, `sparsify`, `rm`, `mv`, `du`.

use super::shapes::{self, Info};
use super::with_session;
use crate::api;
use crate::cli::many::each;
use crate::cli::{
    CreateArgs, DuArgs, DuTarget, GlobalArgs, LsArgs, MvArgs, OneImage, OneSource, RenameOperands, ResizeArgs,
    SparsifyArgs,
};
use crate::client::progress::{Bar, ProgressUnit};
use crate::failure::{Failure, FailureKind, Result};
use crate::ops::{CreateImage, GetImage, GetUsage, ListImages, ListImagesLong, RemoveImage, Sparsify, UpdateImage};
use crate::output::Output;
use crate::spec::{ImageSpec, LOCAL_POOL};

/// Makes an image.
pub fn create(global: &GlobalArgs, output: Output, options: CreateArgs) -> Result<()> {
    let (is_one, images) = (options.name.is_one(), options.name.resolve()?);
    let (size, object_size) = (options.size.0, options.objects.bytes());
    let made = with_session(global, |session| {
        each(images, |ImageSpec { pool, image }| {
            let (features, data_pool) = (options.features.names(), options.features.data_pool.clone());
            let (stripe_unit, stripe_count) = (options.stripes.unit(), options.stripes.stripe_count);
            let request = api::CreateImageRequest {
                pool,
                image,
                size,
                object_size,
                stripe_unit,
                stripe_count,
                features,
                data_pool,
                compression: options.compression.map(|setting| setting.to_string()),
                encrypt: options.encrypt,
            };
            session.call(CreateImage(request), |_| {})
        })
    })?;
    let made: Vec<Info> = made.iter().map(Info::from).collect();
    match made.as_slice() {
        [info] if is_one => output.print(info, |_| String::new()),
        all => output.print(&all, |_| String::new()),
    }
}

/// Lists a pool's images.
pub fn ls(global: &GlobalArgs, output: Output, options: LsArgs) -> Result<()> {
    let pool = options.name.pool;
    if options.long {
        let images = with_session(global, |session| session.call(ListImagesLong { pool }, |_| {}))?;
        return output.print(&images, |images| shapes::listing(images));
    }
    let images = with_session(global, |session| session.call(ListImages { pool }, |_| {}))?;
    let names: Vec<String> = images.into_iter().map(|summary| summary.image).collect();
    output.print(&names, |names| names.join("\n"))
}

/// Shows an image or a snapshot.
pub fn info(global: &GlobalArgs, output: Output, options: OneSource) -> Result<()> {
    let info = with_session(global, |session| session.call(GetImage(options.source), |_| {}))?;
    output.print(&Info::from(&info), Info::text)
}

/// Gives an image another size.
pub fn resize(global: &GlobalArgs, output: Output, options: ResizeArgs) -> Result<()> {
    let update = api::UpdateImageRequest {
        size: Some(options.size.0),
        allow_shrink: options.allow_shrink,
        ..api::UpdateImageRequest::default()
    };
    let operation = UpdateImage { spec: options.name.image, update };
    let bar = Bar::new(global, "Resizing", ProgressUnit::Steps);
    let info = with_session(global, |session| session.call(operation, |now| bar.show(now)))?;
    drop(bar);
    output.print(&Info::from(&info), |_| String::new())
}

/// Frees the space of zeroes.
pub fn sparsify(global: &GlobalArgs, output: Output, options: SparsifyArgs) -> Result<()> {
    let SparsifyArgs { name: OneImage { image }, sparse_size } = options;
    let bar = Bar::new(global, "Sparsifying", ProgressUnit::Steps);
    let request = api::SparsifyRequest { sparse_size: sparse_size.0 };
    with_session(global, |session| {
        session.call(Sparsify { spec: image.clone(), request: request.clone() }, |now| bar.show(now))
    })?;
    drop(bar);
    output.print(&image, |_| String::new())
}

/// Removes an image.
pub fn rm(global: &GlobalArgs, output: Output, options: OneImage) -> Result<()> {
    let bar = Bar::new(global, "Removing", ProgressUnit::Steps);
    let removed = options.image.clone();
    with_session(global, |session| session.call(RemoveImage(options.image), |now| bar.show(now)))?;
    drop(bar);
    output.print(&removed, |_| String::new())
}

/// Gives an image another name.
pub fn mv(global: &GlobalArgs, output: Output, options: MvArgs) -> Result<()> {
    let RenameOperands { image, to } = options.names;
    if image.place() != to.place() {
        let what = format!("{image} cannot become {to}: an image stays in its pool and namespace");
        return Err(Failure::invalid(what).hint(format!("copy it, and remove it then: forebay deep cp {image} {to}")));
    }
    let update = api::UpdateImageRequest { name: Some(to.image), ..api::UpdateImageRequest::default() };
    let operation = UpdateImage { spec: image, update };
    let info = with_session(global, |session| session.call(operation, |_| {}))?;
    output.print(&Info::from(&info), |_| String::new())
}

/// Shows what images take up.
pub fn du(global: &GlobalArgs, output: Output, options: DuArgs) -> Result<()> {
    let bar = Bar::new(global, "Counting", ProgressUnit::Steps);
    let usage = with_session(global, |session| {
        let usage = |pool: &str, image: Option<&str>, snapshot: Option<&str>| {
            let (pool, image, snapshot) = (pool.into(), image.map(Into::into), snapshot.map(Into::into));
            session.call(GetUsage { pool, image, snapshot, exact: options.exact }, |now| bar.show(now))
        };
        match &options.target {
            DuTarget::Pool(pool) => usage(pool, None, None),
            DuTarget::Image(spec) => usage(&spec.image.pool, Some(&spec.image.image), spec.snapshot.as_deref()),
            DuTarget::PoolOrImage(name) => match usage(name, None, None) {
                Err(no_pool) if no_pool.kind == FailureKind::NotFound => match usage(LOCAL_POOL, Some(name), None) {
                    Err(failure) if failure.kind == FailureKind::NotFound => Err(neither(name)),
                    // Without a store there is no image either; that the pool is missing is what was asked about.
                    Err(failure) if failure.kind == FailureKind::Unreachable => Err(no_pool),
                    found => found,
                },
                Err(failure) if matches!(failure.kind, FailureKind::Failed | FailureKind::Unreachable) => {
                    // A cluster that does not answer may have a pool of that name.
                    let named = format!("an image of the default pool is named {LOCAL_POOL}/{name}");
                    let hint = failure.hint.as_ref().map_or_else(|| named.clone(), |hint| format!("{hint}; {named}"));
                    Err(failure.hint(hint))
                }
                found => found,
            },
        }
    })?;
    drop(bar);
    output.print(&usage, shapes::usage)
}

fn neither(name: &str) -> Failure {
    Failure::new(FailureKind::NotFound, format!("there is no pool '{name}', and no image {LOCAL_POOL}/{name}"))
        .hint(format!("'forebay ls' lists the images of the pool {LOCAL_POOL}; 'ceph osd pool ls', a cluster's pools"))
}
